"""Features of devices.

This module does not import Triton, so the code of 8-bit weights and caches can import it on any device.
"""

from functools import cache

import torch


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Return whether the device can convert and multiply e4m3 values (compute capability 8.9 or higher)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_tma(device: torch.device) -> bool:
    """Return whether the device has dependent launch, tile loads (TMA), and 227 KB of shared memory.

    Hopper and data-centre Blackwell GPUs have dependent launch, TMA, and 227 KB of shared memory. Other Blackwell chips
    have only 99 KB of shared memory, and are treated like older GPUs.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def has_hopper_kernels() -> bool:
    """Return whether the Gluon kernels can run.

    The Gluon kernels need Hopper and exactly Triton 3.6, because Gluon changes from version to version.
    """
    from triton import __version__

    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return is_hopper and __version__.startswith("3.6.")


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 4 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

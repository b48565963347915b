"""What devices support. Importing this needs no Triton, because 8-bit weights and caches ask this on any device."""

from functools import cache

import torch


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether the device converts and multiplies e4m3: a GPU with compute capability 8.9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the device has dependent launch, loads of whole tiles (TMA), and 227 KB of shared memory.

    This holds for Hopper and data-centre Blackwell. Other Blackwell chips have only 99 KB of shared memory, and are
    treated like older GPUs.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def has_hopper_kernels() -> bool:
    """Whether the kernels in Gluon can run: on Hopper with Triton 3.6, because Gluon changes between versions."""
    from triton import __version__

    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return is_hopper and __version__.startswith("3.6.")


@cache
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

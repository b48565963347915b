"""What devices have. Weights and caches of 8 bits ask this on any device: importing it takes no Triton."""

from functools import cache

import torch


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether the device converts and multiplies e4m3: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the device has Hopper's dependent launch, loads of whole tiles (TMA), and 227 KB of shared memory.

    Hopper and data-centre Blackwell have. Other Blackwell chips have 99 KB of shared memory, and count as older ones.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def has_hopper_kernels() -> bool:
    """Whether the GPU is a Hopper, and Triton a version that the kernels in Gluon were tried with: it still changes."""
    from triton import __version__

    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return is_hopper and __version__.startswith("3.6.")


@cache
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; a small one for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

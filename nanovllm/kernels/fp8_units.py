"""Which devices compute in FP8. Imported for weights and caches of 8 bits, on any device."""

from functools import cache

import torch


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether the device converts and multiplies e4m3: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

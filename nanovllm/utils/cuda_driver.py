"""Calls the CUDA driver through ctypes, and makes tensors at addresses that the driver returns."""

import ctypes
from functools import cache
from typing import Any

import torch

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def call_driver(name: str, *arguments: Any) -> None:
    """Call a driver function. If the call fails, raises torch.OutOfMemoryError or RuntimeError."""
    if error := getattr(_driver(), name)(*arguments):
        kind = torch.OutOfMemoryError if error == OUT_OF_MEMORY else RuntimeError
        raise kind(f"{name}: CUDA error {error}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class DeviceBytes:
    """Device memory.

    `torch.as_tensor` turns this object into a tensor without a copy. The tensor keeps this object alive.
    """

    def __init__(self, address: int, num_bytes: int):
        self.address, self.num_bytes = address, num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the memory as a tensor [num_bytes] uint8."""
        return torch.as_tensor(self, device=device)

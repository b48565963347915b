"""Frees GPU memory, and allocates it again at the same addresses, through CUDA's virtual memory management.

The addresses stay the same so that CUDA graphs stay valid. Between the release of the memory and the next allocation,
nothing may use these addresses.
"""

import ctypes
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.utils.cuda_driver import DeviceBytes, call_driver

PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_ZERO = ctypes.c_uint64(0)  # no flags; as an address: any address


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Arena(TorchDispatchMode):
    """A set of tensors whose memory is freed and allocated together.

    Within a `with` block, `torch.empty` on the device allocates tensors of at least 2 MiB (the granularity of physical
    memory) from the arena. The address range of a tensor is released with the tensor.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.is_mapped = True
        self._ranges: WeakValueDictionary[int, _Range] = WeakValueDictionary()  # by address
        self._copies: dict[int, torch.Tensor] = {}  # in host memory
        location = _Location(ON_DEVICE, device.index or 0)
        self._prop, self._access = _AllocationProp(PINNED, 0, location), _AccessDesc(location, READ_AND_WRITE)
        granularity = ctypes.c_size_t()
        _synchronize(device)  # creates the CUDA context that the driver calls need
        call_driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), 0)
        self._granularity = granularity.value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and options.get("device") == self.device:
            like = func(*args, **options | {"device": "meta", "pin_memory": False})
            if like.nbytes >= self._granularity:
                return self.empty(like)
        return func(*args, **options)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        assert self.is_mapped
        size = -(-like.nbytes // self._granularity) * self._granularity
        new = _Range(size, like.nbytes, self.device)
        new.map(self._prop, self._access)
        self._ranges[new.address] = new
        return new.tensor(self.device).view(like.dtype).view(like.shape)

    @property
    def num_bytes(self) -> int:
        return sum(found.size for found in self._ranges.values())

    def keep(self) -> None:
        """Copy the contents of all tensors to host memory.

        If host memory is too small, raise RuntimeError and keep no copies.
        """
        options: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": self.device.type == "cuda"}
        copies = {address: torch.empty(found.num_bytes, **options) for address, found in [*self._ranges.items()]}
        for address, copy in copies.items():
            copy.copy_(self._ranges[address].tensor(self.device), non_blocking=True)
        self._copies = copies

    def unmap(self) -> int:
        ranges = [*self._ranges.values()]
        _synchronize(self.device)  # queued kernels may still use the ranges
        for found in ranges:
            found.unmap()
        torch.cuda.empty_cache()  # also frees PyTorch's cached blocks
        self.is_mapped = False
        return sum(found.size for found in ranges)

    def drop_copies(self) -> int:
        """Drop the host copies. Return 0, because no device memory is freed."""
        self._copies = {}
        return 0

    def map(self) -> None:
        """Allocate uninitialized memory for all tensors. If torch.OutOfMemoryError is raised, no tensor has memory."""
        with ExitStack() as undo:
            for found in [*self._ranges.values()]:
                found.map(self._prop, self._access)
                undo.callback(found.unmap)
            undo.pop_all()
        self.is_mapped = True

    def fill(self) -> None:
        """Restore the contents that `keep` copied, and fill other tensors with zeros."""
        for found in [*self._ranges.values()]:
            tensor = found.tensor(self.device)
            copy = self._copies.get(found.address)
            tensor.zero_() if copy is None else tensor.copy_(copy, non_blocking=True)
        _synchronize(self.device)  # until then, the device reads the copies
        self.drop_copies()


class _Range(DeviceBytes):
    """An address range of `size` bytes, with or without physical memory. A tensor uses the first `num_bytes` bytes."""

    def __init__(self, size: int, num_bytes: int, device: torch.device):
        address = ctypes.c_uint64()
        call_driver(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), _ZERO, _ZERO
        )
        super().__init__(address.value, num_bytes)
        self.size, self.device = size, device
        self._handle: ctypes.c_uint64 | None = None  # of the physical memory

    def map(self, prop: _AllocationProp, access: _AccessDesc) -> None:
        handle = ctypes.c_uint64()
        with ExitStack() as undo:
            call_driver("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(prop), _ZERO)
            undo.callback(call_driver, "cuMemRelease", handle)
            call_driver("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, _ZERO)
            undo.callback(call_driver, "cuMemUnmap", self._address, self._size)
            call_driver("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
            undo.pop_all()
        self._handle = handle

    def unmap(self) -> None:
        call_driver("cuMemUnmap", self._address, self._size)
        call_driver("cuMemRelease", self._handle)
        self._handle = None

    @property
    def _address(self) -> ctypes.c_uint64:
        return ctypes.c_uint64(self.address)

    @property
    def _size(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self.size)

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may be gone, or the constructor may have failed
            if self._handle is not None:
                _synchronize(self.device)
                self.unmap()
            call_driver("cuMemAddressFree", self._address, self._size)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

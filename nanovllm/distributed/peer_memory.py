"""Memory of every rank's GPU that the kernels of all the others read and write, over NVLink or PCIe."""

import ctypes
from dataclasses import dataclass

import torch
from torch.distributed import Store

MAX_PROGRAMS = 512  # of a kernel that meets its likes on the other ranks
MAX_KEYS = 65536
KEYS = 2  # where keys meet; 0 and 1 are the places of sums


class PeerMemory:
    """One allocation of the same layout on every rank, for kernels/peers.py: flags, keys, and two places for sums.

    A kernel of each rank writes its part of a sum to a place, and the next meets its likes and reads all parts. Places
    change over with every sum of a forward, so a rank that is ahead never writes what another still reads: to write the
    place again it has met the others since, and they came there after they had read it. Every forward ends with keys,
    which have a place of their own, and so every forward begins with the first place.

    It is shared by CUDA's handles for other processes, and needs no NVLink multicast.
    """

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, room: int):
        """`room` is the bytes of the largest sum. Returns when all ranks have come."""
        self.rank, self.size, self.device = rank, size, device
        self.keys_offset = (KEYS + 1) * MAX_PROGRAMS * size * 4
        self.places_offset = self.keys_offset + MAX_KEYS * 8
        self.room = -(-room // 16) * 16
        num_bytes = self.places_offset + 2 * self.room
        self._turn = 0
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # and so there is a context for what follows
            self._pointers = [0] * size
            self._pointers[rank] = _allocate(num_bytes)
            self.memory = torch.as_tensor(_Bytes(self._pointers[rank], num_bytes), device=device)
            self.memory[: self.places_offset].zero_()
            torch.cuda.synchronize()  # nobody meets before the flags are down
            store.set(str(rank), _handle_of(self._pointers[rank]))
            for other in range(size):
                if other != rank:
                    self._pointers[other] = _open(store.get(str(other)))
            self.addresses = torch.tensor(self._pointers, dtype=torch.int64, device=device)
            # on the host, where kernels look when they wait long
            self.aborted = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)

    @staticmethod
    def is_possible(device: torch.device, rank: int, size: int) -> bool:
        """Whether all GPUs of the ranks reach each other: those of consecutive numbers, `device` the one of `rank`."""
        numbers = range(device.index - rank, device.index - rank + size)
        return all(torch.cuda.can_device_access_peer(a, b) for a in numbers for b in numbers if a != b)

    def place(self, parts: int, num_rows: int, width: int, dtype: torch.dtype) -> "PeerSum":
        """Where this rank's part of a sum [num_rows, width] is to be written, itself in `parts` that are to be added."""
        turn, self._turn = self._turn, self._turn ^ 1
        offset = self.places_offset + turn * self.room
        num_bytes = parts * num_rows * width * dtype.itemsize
        assert num_bytes <= self.room
        mine = self.memory[offset : offset + num_bytes].view(dtype).view(parts, num_rows, width)
        return PeerSum(mine, self._meeting(turn, offset))

    def keys(self) -> tuple:
        """What kernels/peers.py must know for keys; it ends a forward."""
        self._turn = 0
        return self._meeting(KEYS, self.keys_offset)

    def _meeting(self, where: int, offset: int) -> tuple:
        flags_offset = where * MAX_PROGRAMS * self.size * 4
        return self.addresses, offset, flags_offset, MAX_PROGRAMS, self.aborted, self.rank

    def abort(self) -> None:
        """Release the kernels that wait for a rank, now and from now on."""
        self.aborted.fill_(1)

    def close(self) -> None:
        """Free it; nothing that reads it may be queued any more."""
        with torch.cuda.device(self.device):
            for rank, pointer in enumerate(self._pointers):
                name = "cuMemFree_v2" if rank == self.rank else "cuIpcCloseMemHandle"
                _cuda(name, ctypes.c_uint64(pointer))


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


class _Bytes:
    """Device memory as what torch.as_tensor takes without a copy."""

    def __init__(self, pointer: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _cuda(name: str, *arguments) -> None:
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise RuntimeError(f"{name}: CUDA error {error}")


def _allocate(num_bytes: int) -> int:
    pointer = ctypes.c_uint64()
    _cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    return pointer.value


def _handle_of(pointer: int) -> bytes:
    handle = _Handle()
    _cuda("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
    return bytes(handle)


def _open(handle: bytes) -> int:
    pointer, enable_peer_access = ctypes.c_uint64(), 1
    _cuda("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), enable_peer_access)
    return pointer.value


@dataclass(frozen=True, slots=True)
class PeerSum:
    """The sum of what all ranks hold at one place of their PeerMemory, for the kernel that needs it to add up.

    mine: [parts, rows, width], this rank's, of which the parts are added as well.
    meeting: what kernels/peers.py must know besides.
    """

    mine: torch.Tensor
    meeting: tuple

    def __len__(self) -> int:
        return self.mine.shape[1]

"""Memory of every rank's GPU that the kernels of all the others read and write, over NVLink or PCIe."""
import os
from dataclasses import dataclass

import torch
from torch.distributed import Store

MOST_PROGRAMS = 512  # of a kernel that meets its likes on the other ranks
MOST_KEYS = 65536
KEYS = 2  # where keys meet; 0 and 1 are the places of sums


class PeerMemory:
    """One allocation of the same layout on every rank, for kernels/peers.py: flags, keys, and two places for sums.

    A kernel of each rank writes its part of a sum to a place, and the next meets its likes and reads all parts. Places
    change over with every sum of a forward, so a rank that is ahead never writes what another still reads: to write the
    place again it has met the others since, and they came there after they had read it. Every forward ends with keys,
    which have a place of their own, and so every forward begins with the first place.

    PyTorch's symmetric memory maps it, without NVLink multicast.
    """

    def __init__(self, rank: int, size: int, store: Store, name: str, device: torch.device, room: int):
        """`room` is the bytes of the largest sum, and `name` one that this process has not used before."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch._C._distributed_c10d import _SymmetricMemory

        self.rank, self.size, self.device = rank, size, device
        self.keys_offset = (KEYS + 1) * MOST_PROGRAMS * size * 4
        self.places_offset = self.keys_offset + MOST_KEYS * 8
        self.room = -(-room // 16) * 16
        num_bytes = self.places_offset + 2 * self.room
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self.memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        self._handle = _SymmetricMemory.rendezvous(self.memory, name)
        addresses = [self._handle.get_buffer(peer, (num_bytes,), torch.uint8).data_ptr() for peer in range(size)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.memory[: self.places_offset].zero_()
        self.aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._turn = 0
        torch.cuda.synchronize(device)
        self._handle.barrier()  # nobody meets before all flags are down
        torch.cuda.synchronize(device)

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
        flags_offset = where * MOST_PROGRAMS * self.size * 4
        return self.addresses, offset, flags_offset, MOST_PROGRAMS, self.aborted, self.rank

    def abort(self) -> None:
        """Release the kernels that wait for a rank; from another thread, and past whatever the device is busy with."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self.aborted.copy_(self._one, non_blocking=True)


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

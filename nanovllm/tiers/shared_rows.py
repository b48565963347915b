"""Implements host memory that all ranks map, so that rank 0 can write the rows of every rank to files."""

import mmap

import torch

from nanovllm.utils.tensor_parallel import TensorParallel

COUNTER_BYTES = 4  # few enough that a copy writes them at once


class SharedRows:
    """Holds the rows of all ranks, and the number of copies that each rank has completed.

    The memory is an unnamed file. Rank 0 creates the file, and the other ranks open it through /proc. The file needs no
    space in /dev/shm, and is gone when the processes end. Each rank's part of the file contains the rank's rows and, at
    the end of the last page, a counter of copies.

    part: the part of this rank, [bytes] uint8.
    rows: the rows of all ranks, [ranks, rows, bytes] uint8.
    """

    def __init__(self, tp: TensorParallel, num_rows: int, row_bytes: int, pid: int, fd: int):
        """Map the file that process `pid` has opened as `fd`. Raises OSError if the file can't be mapped."""
        num_bytes = num_rows * row_bytes
        part_bytes = -(-(num_bytes + COUNTER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as file:
            file.truncate(tp.size * part_bytes)  # on all ranks to the same size
            memory = mmap.mmap(file.fileno(), tp.size * part_bytes)
        parts = torch.frombuffer(memory, dtype=torch.uint8).view(tp.size, part_bytes)
        self.part = parts[tp.rank]
        self.rows = parts[:, :num_bytes].unflatten(1, (num_rows, row_bytes))
        self._counters = parts[:, -COUNTER_BYTES:].view(torch.int32)[:, 0]  # [ranks]
        self._counter = self._counters[tp.rank]

    def report(self, num_copies: int, device: torch.device) -> None:
        """Set this rank's counter of copies. On CUDA, the current stream sets the counter after its earlier work."""
        self._counter.copy_(torch.full((), num_copies, dtype=torch.int32, device=device), non_blocking=True)

    def have_ended(self, num_copies: int) -> bool:
        """Return whether every rank has completed its first `num_copies` copies."""
        return min(self._counters.tolist()) >= num_copies

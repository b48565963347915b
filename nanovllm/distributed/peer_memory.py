"""Shares GPU memory between the kernels of all ranks, over NVLink or PCIe."""

import ctypes

import torch
from torch.distributed import Store

from nanovllm.distributed.kernels.peers import PeerBarrier
from nanovllm.distributed.ranks import Ranks
from nanovllm.kernels import ops
from nanovllm.utils.cuda_driver import DeviceBytes, call_driver
from nanovllm.utils.double_buffer import DoubleBuffer
from nanovllm.utils.partial_sum import Compute, PartialSum

MAX_PROGRAMS = 512  # the maximum number of programs of a kernel that waits for other ranks
MAX_KEYS = 65536
KEYS = 2  # index of the barrier for keys, such as those of sampled tokens; barriers 0 and 1 are for the sum buffers


class PeerAllReduce(PartialSum):
    """A sum over all ranks. `parts` [split_k, T, N] holds this rank's summands, in memory that the other ranks read.

    The kernel that reads the sum waits at the barrier until all ranks have written their summands.
    """

    __slots__ = ("barrier",)

    def __init__(self, parts: torch.Tensor, split_k: int, barrier: PeerBarrier):
        super().__init__(parts, split_k)
        self.barrier = barrier

    @property
    def tensor(self) -> None:
        """Always None, because the other ranks' summands are not added yet."""
        return None

    def reduce(self) -> torch.Tensor:
        ones = torch.ones(self.parts.shape[-1], dtype=self.parts.dtype, device=self.parts.device)
        return ops.sum_rms_norm(self.parts, self.barrier, ones, 1.0)[1]  # there is no kernel for the sum alone


class PeerMemory:
    """Memory for the kernels in peers.py, with the same layout on all ranks: flags, keys, and two buffers for sums.

    One kernel writes the rank's summands to a buffer. The next kernel waits for the other ranks and reads all summands.
    The two buffers alternate within a forward pass, so a fast rank never overwrites summands that another rank still
    reads. Before a rank writes to buffer A again, it passes the barrier of buffer B. The other ranks reach the barrier
    of buffer B only after they have read buffer A. Every forward pass ends with an exchange of keys (`all_reduce_max`),
    which has a separate buffer and barrier. After the exchange of keys, no rank reads a sum any more, so every forward
    pass can begin with the first buffer for sums.

    The memory is shared through CUDA IPC handles, without NVLink multicast.
    """

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, max_sum_bytes: int):
        self.rank, self.size, self.device = rank, size, device
        self.keys_offset = (KEYS + 1) * MAX_PROGRAMS * size * 4
        self.sums_offset = self.keys_offset + MAX_KEYS * 8
        self.capacity = -(-max_sum_bytes // 16) * 16  # of one buffer, in bytes
        num_bytes = self.sums_offset + 2 * self.capacity
        self._sum_buffers = DoubleBuffer(0, 1)
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the CUDA context that the driver calls need
            self._pointers = [0] * size
            self._pointers[rank] = _allocate(num_bytes)
            self.memory = DeviceBytes(self._pointers[rank], num_bytes).tensor(device)
            self.memory[: self.sums_offset].zero_()
            torch.cuda.synchronize()  # the flags are cleared before another rank can set them
            store.set(str(rank), _handle_of(self._pointers[rank]))
            for other in range(size):
                if other != rank:
                    self._pointers[other] = _open(store.get(str(other)))
            self.addresses = torch.tensor(self._pointers, dtype=torch.int64, device=device)
            # in host memory, so that the host can stop waiting kernels
            self.aborted = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)

    def next_sum(self, split_k: int, num_rows: int, width: int, dtype: torch.dtype) -> PeerAllReduce:
        """Return a sum [num_rows, width]. The caller must write the sum's `parts` [split_k, num_rows, width]."""
        index = self._sum_buffers.advance()
        offset = self.sums_offset + index * self.capacity
        num_bytes = split_k * num_rows * width * dtype.itemsize
        assert num_bytes <= self.capacity
        parts = self.memory[offset : offset + num_bytes].view(dtype).view(split_k, num_rows, width)
        return PeerAllReduce(parts, split_k, self._barrier(index, offset))

    def keys_barrier(self) -> PeerBarrier:
        """Return the barrier for the exchange of keys that ends a forward pass."""
        self._sum_buffers.reset()
        return self._barrier(KEYS, self.keys_offset)

    def _barrier(self, index: int, data_offset: int) -> PeerBarrier:
        flags_offset = index * MAX_PROGRAMS * self.size * 4
        return PeerBarrier(self.addresses, data_offset, flags_offset, MAX_PROGRAMS, self.aborted, self.rank)

    def abort(self) -> None:
        self.aborted.fill_(1)

    def close(self) -> None:
        """Free the memory. The caller must make sure that no queued work will read this memory."""
        with torch.cuda.device(self.device):
            for rank, pointer in enumerate(self._pointers):
                name = "cuMemFree_v2" if rank == self.rank else "cuIpcCloseMemHandle"
                call_driver(name, ctypes.c_uint64(pointer))


class PeerTensorParallel(Ranks):
    """Ranks on GPUs that read each other's memory. The kernel that reads a sum also adds the ranks' summands."""

    def __init__(self, peers: PeerMemory):
        super().__init__(peers.rank, peers.size)
        self.peers: PeerMemory | None = peers
        self.num_bytes = peers.memory.nbytes

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        return ops.all_reduce_max(keys, self.peers.keys_barrier())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(lambda out: out.copy_(x), *x.shape, x.dtype).reduce()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(lambda out: out.copy_(x), *x.shape, x.dtype)

    def sum(self, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, split_k: int = 1) -> PeerAllReduce:
        """See `sum_over_ranks`. `compute` writes to memory that the other ranks read."""
        y = self.peers.next_sum(split_k, num_rows, width, dtype)
        compute(y.parts)
        return y

    def gather(
        self, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, params: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the concatenated results of `compute` on all ranks: [num_rows, ranks * width].

        If `params` (sampling parameters) are given, rows without filters such as top-p may lack the columns of other
        ranks.
        """
        y = self.sum(compute, num_rows, width, dtype)
        return ops.gather_columns(y.parts[0], y.barrier, params)

    def abort(self) -> None:
        super().abort()
        if self.peers is not None:
            self.peers.abort()

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self.peers, self.num_bytes = None, 0

    def leave_in_child(self) -> None:
        super().leave_in_child()
        self.peers, self.num_bytes = None, 0


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


def _allocate(num_bytes: int) -> int:
    pointer = ctypes.c_uint64()
    call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    return pointer.value


def _handle_of(pointer: int) -> bytes:
    handle = _Handle()
    call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
    return bytes(handle)


def _open(handle: bytes) -> int:
    pointer, enable_peer_access = ctypes.c_uint64(), 1
    call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), enable_peer_access)
    return pointer.value

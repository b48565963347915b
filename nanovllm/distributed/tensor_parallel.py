"""The ranks that share a model: this rank's place among them, and what they do together."""

import ctypes
import os
import shutil
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist

from nanovllm.distributed.peer_memory import PeerMemory

STEP_TIMEOUT = 300.0  # seconds that a rank waits for the others within a step


@dataclass(eq=False)
class TensorParallel:
    """This rank's place among the ranks.

    They meet in a file of the engine's own, with no port and no default process group. `group` is gloo on CPUs and NCCL on
    GPUs that can't read each other's memory; where they can, they have `peers` instead, and sums are left to the kernel
    that reads them.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    peers: PeerMemory | None = None
    lost: bool = False  # another rank is gone, and what we compute is worthless
    folder: Path | None = None  # of the file in which the ranks met, where `group` goes on using it, as NCCL does

    @classmethod
    def connect(cls, rank: int, size: int, folder: Path, device: torch.device, room: int) -> "TensorParallel":
        """Meet the other ranks in `folder`; returns when all have come. `room` is the bytes of the largest sum."""
        store = dist.FileStore(str(folder / "store"), size)
        timeout = timedelta(seconds=STEP_TIMEOUT)
        group = peers = kept = None
        if device.type == "cpu":
            group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        elif PeerMemory.is_possible(device, rank, size):
            peers = PeerMemory(rank, size, dist.PrefixStore("peers", store), device, room)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            kept = folder
        tp = cls(rank, size, group, peers, folder=kept)
        _connected.add(tp)
        return tp

    def shard_size(self, what: str, total: int) -> int:
        """An equal share of `total`; ValueError where there is none."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size}: does not divide the {what} ({total})")
        return total // self.size

    def for_heads(self, num_kv_heads: int) -> "TensorParallel":
        """The ranks among which key-value heads are cut: where there are fewer heads than ranks, several hold the same."""
        if num_kv_heads >= self.size:
            return self
        if self.size % num_kv_heads:
            raise ValueError(f"tensor_parallel_size={self.size}: no multiple of the key-value heads ({num_kv_heads})")
        return TensorParallel(self.rank * num_kv_heads // self.size, num_kv_heads)

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum (or another `op`) of every rank's `x`, in place."""
        if self.group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self.group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [...], in the order of the ranks: [ranks, ...]."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        if len(x):
            self.group._allgather_base(out, x.contiguous()).wait()
        return out.view(self.size, *x.shape)

    @property
    def num_bytes(self) -> int:
        """Of device memory that PyTorch's allocator does not know of."""
        return self.peers.memory.nbytes if self.peers is not None else 0

    def check(self) -> None:
        """RuntimeError if a rank was lost."""
        if self.lost:
            raise RuntimeError("another rank was lost")

    def abort(self) -> None:
        """Another rank is lost: the device is to stop waiting for it."""
        self.lost = True
        if self.peers is not None:
            self.peers.abort()
        elif self.group is not None:  # in half a second, unless NCCL waits for graphs that are still there
            thread = threading.Thread(target=self.group.abort, name="nanovllm abort", daemon=True)
            thread.start()
            thread.join(2.0)

    def close(self) -> None:
        """Leave the others; nothing that needs them may be queued any more."""
        if self.peers is not None:
            self.peers.close()
        elif self.group is not None and not self.lost:
            self.group.abort()  # what frees it in good order waits for the others
        self.group = self.peers = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


_connected: WeakSet[TensorParallel] = WeakSet()


def _leave_in_child() -> None:
    """In a forked child: the ranks are the parent's, and so are the groups' threads, which their destructors join."""
    for tp in _connected:
        if tp.group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tp.group))  # never destroyed
        tp.group, tp.peers, tp.lost = None, None, True


os.register_at_fork(after_in_child=_leave_in_child)

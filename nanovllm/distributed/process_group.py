"""Connects the ranks that share a model, and implements collective operations with a process group."""

import ctypes
import importlib.util
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.distributed.ranks import Ranks
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT


def connect(rank: int, size: int, folder: Path, device: torch.device, max_sum_bytes: int) -> Ranks:
    """Connect to the other ranks through a file in `folder`. Return when all ranks have connected.

    No port and no default process group are used. `max_sum_bytes` is the size in bytes of the largest sum of a forward
    pass. GPUs use PeerMemory if they can read each other's memory, and NCCL if they can't. CPUs use gloo.
    """
    store = dist.FileStore(str(folder / "store"), size)
    tp: Ranks
    if device.type == "cuda" and _can_read_peers(device, rank, size):
        from nanovllm.distributed.peer_memory import PeerMemory, PeerTensorParallel

        tp = PeerTensorParallel(PeerMemory(rank, size, dist.PrefixStore("peers", store), device, max_sum_bytes))
    else:
        tp = GroupTensorParallel(rank, size, store, folder, device)
    _connected.add(tp)
    return tp


def check_order_of_sums(config: Config) -> None:
    """Raise ValueError if `batch_invariant` is on, but the ranks' summands are not added in a fixed order."""
    device, size = config.device_of(0), config.tensor_parallel_size
    if config.batch_invariant and device.type == "cuda" and not _can_read_peers(device, 0, size):
        problem = "must be 1, as these GPUs can't read each other's memory: NCCL's order of sums depends on the batch"
        raise ValueError(f"batch_invariant=True: tensor_parallel_size={size}: {problem}")


def _can_read_peers(device: torch.device, rank: int, size: int) -> bool:
    """Return True if Triton is installed and the ranks' GPUs (at consecutive indices) can read each other's memory."""
    indices = range(device.index - rank, device.index - rank + size)
    return importlib.util.find_spec("triton") is not None and all(
        torch.cuda.can_device_access_peer(a, b) for a in indices for b in indices if a != b
    )


class GroupTensorParallel(Ranks):
    """Ranks that communicate through a process group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, rank: int, size: int, store: dist.Store, folder: Path, device: torch.device):
        super().__init__(rank, size)
        timeout = timedelta(seconds=STEP_TIMEOUT)
        self.group: dist.ProcessGroup | None
        if device.type == "cpu":
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            self.folder = folder  # NCCL still uses it

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def _all_reduce(self, x: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        if len(x):
            self.group._allgather_base(out, x.contiguous()).wait()
        return out.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(keys, dist.ReduceOp.MAX)

    def abort(self) -> None:
        super().abort()
        if self.group is not None:  # takes half a second, unless NCCL waits for graphs that still exist
            thread = threading.Thread(target=self.group.abort, name="nanovllm abort", daemon=True)
            thread.start()
            thread.join(2.0)

    def close(self) -> None:
        if self.group is not None and not self.lost:
            self.group.abort()  # an orderly shutdown would wait for the other ranks
        self.group = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def leave_in_child(self) -> None:
        super().leave_in_child()
        if self.group is not None:  # its destructor would join threads that a child does not have
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.group = None


_connected: WeakSet[Ranks] = WeakSet()


def _leave_in_child() -> None:
    for tp in _connected:
        tp.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)

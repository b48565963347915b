"""A rank's place among the ranks that share a model. This file has the single rank; `distributed/` has several."""

import torch

STEP_TIMEOUT = 300.0  # seconds that a rank waits for the others within a step


class TensorParallel:
    """A rank and the number of ranks: how a model is split over them, and their collective operations.

    This class is a single rank, which does not communicate. With another size it only computes shards. The subclasses
    in `distributed/` communicate.
    """

    lost = False  # another rank is gone, so this rank's results are invalid
    num_bytes = 0  # device memory that PyTorch's allocator does not count

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank = rank
        self.size = size

    def shard_size(self, what: str, total: int) -> int:
        """An equal share of `total`; ValueError that names `what` if the number of ranks does not divide it."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size}: does not divide the {what} ({total})")
        return total // self.size

    def local_slice(self, total: int) -> slice:
        """This rank's equal share of `total` elements. ValueError if the number of ranks does not divide `total`."""
        size = self.shard_size("checkpoint tensor", total)
        return slice(self.rank * size, (self.rank + 1) * size)

    def for_heads(self, num_kv_heads: int) -> "TensorParallel":
        """How key-value heads are split: if there are fewer heads than ranks, several ranks hold the same head."""
        if num_kv_heads >= self.size:
            return self
        if self.size % num_kv_heads:
            raise ValueError(f"tensor_parallel_size={self.size}: no multiple of the key-value heads ({num_kv_heads})")
        return TensorParallel(self.rank * num_kv_heads // self.size, num_kv_heads)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x; x may be overwritten."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [T, N] side by side: [T, ranks * N]."""
        return x

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of every rank's keys [S] int64; S may be 0. Each forward of several ranks ends so."""
        return keys

    def barrier(self, device: torch.device) -> None:
        """Make all later work on the device wait for all ranks, as at the end of each forward."""

    def check(self) -> None:
        """RuntimeError if a rank was lost."""

    def close(self) -> None:
        """Disconnect from the other ranks. No queued work may need them."""

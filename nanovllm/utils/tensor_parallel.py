"""Splits a model over ranks, and defines collective operations. `distributed/` implements several ranks."""

import torch

STEP_TIMEOUT = 300.0  # seconds that a rank waits for other ranks within a step


class TensorParallel:
    """Splits a model over `size` ranks, of which this process is rank `rank`.

    The collective operations of this class are those of a single rank.
    """

    lost = False  # whether another rank is gone, so that this rank's results are invalid
    num_bytes = 0  # device memory that PyTorch's allocator does not count

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank = rank
        self.size = size

    def shard_size(self, what: str, total: int) -> int:
        """Return a rank's equal share of `total`, or raise a ValueError that names `what`."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size}: does not divide the {what} ({total})")
        return total // self.size

    def local_slice(self, total: int) -> slice:
        size = self.shard_size("checkpoint tensor", total)
        return slice(self.rank * size, (self.rank + 1) * size)

    def for_heads(self, num_kv_heads: int) -> "TensorParallel":
        """Return the TensorParallel that splits key-value heads, which several ranks may share."""
        if num_kv_heads >= self.size:
            return self
        if self.size % num_kv_heads:
            raise ValueError(f"tensor_parallel_size={self.size}: not a multiple of the {num_kv_heads} key-value heads")
        return TensorParallel(self.rank * num_kv_heads // self.size, num_kv_heads)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x. May overwrite x."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the x [T, N] of all ranks along the last dimension. Return [T, ranks * N]."""
        return x

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of the `keys` [S] int64 of all ranks (S may be 0), at the end of a pass."""
        return keys

    def barrier(self, device: torch.device) -> None:
        """Make all later work on the device wait for all ranks. (`all_reduce_max` also does so.)"""

    def check(self) -> None:
        """Raise RuntimeError if a rank was lost."""

    def close(self) -> None:
        """Disconnect from the other ranks. Work that is still queued must not use the other ranks."""

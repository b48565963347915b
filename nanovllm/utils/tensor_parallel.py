"""This rank's place among the ranks that share a model. Here there is one rank; `distributed/` has several."""

from collections.abc import Callable
from typing import Any

import torch

STEP_TIMEOUT = 300.0  # seconds that a rank waits for the others within a step


class PartialSum:
    """A [T, N] tensor as a sum of parts, which its reader adds up, in the kernel that reads it if there is one.

    parts: [T, N], or with split_k > 1 [split_k, T, N], to be summed over the first dimension.
    barrier: what the kernel that reads it waits at, to add the other ranks' parts too (distributed/peer_memory.py);
        None: there are none.
    """

    __slots__ = ("device", "parts", "split_k")
    barrier: Any = None

    def __init__(self, parts: torch.Tensor, split_k: int = 1):
        self.parts, self.split_k, self.device = parts, split_k, parts.device

    def __len__(self) -> int:
        """T, the number of rows."""
        return self.parts.shape[-2]

    @property
    def tensor(self) -> torch.Tensor | None:
        """The sum, if there is nothing left to add."""
        return self.parts if self.split_k == 1 else None

    def reduce(self) -> torch.Tensor:
        """The sum [T, N]."""
        return self.parts if self.split_k == 1 else self.parts.sum(0)


Compute = Callable[[torch.Tensor | None], torch.Tensor]  # writes to its argument if there is one, and returns it


class TensorParallel:
    """A rank and the number of ranks, how a model is divided over them, and what they compute together.

    This class alone is a single rank, whose sums and maxima are its own; with another size it tells only the shards.
    The subclasses in `distributed/` communicate.
    """

    lost = False  # another rank is gone, and what this one computes is worthless
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
        """This rank's equal share of `total` elements, which the number of ranks divides."""
        size = self.shard_size("checkpoint tensor", total)
        return slice(self.rank * size, (self.rank + 1) * size)

    def sum(self, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, split_k: int = 1) -> PartialSum:
        """The sum of what `compute` returns on every rank: [num_rows, width], or split_k > 1 parts of that shape.

        Ranks that read each other's memory pass `compute` what it writes to, [split_k, num_rows, width] of that memory.
        """
        return PartialSum(compute(None), split_k)

    def max_split_k(self, num_rows: int) -> int:
        """How many parts a summand of `sum` may have at most."""
        return 4 if self.size == 1 else 1

    def gather(
        self, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, params: torch.Tensor | None
    ) -> torch.Tensor:
        """What `compute` returns on every rank, [num_rows, width], side by side: [num_rows, ranks * width].

        With sampling parameters, rows that are not filtered may lack the columns of the other ranks.
        """
        return compute(None)

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of every rank's keys [S] int64; S may be 0. It ends each forward of several ranks."""
        return keys

    def barrier(self, device: torch.device) -> None:
        """Make what is queued on the device from now on wait for all ranks, as at the end of each forward."""

    def check(self) -> None:
        """RuntimeError if a rank was lost."""

    def close(self) -> None:
        """Leave the other ranks; no queued work may need them any more."""

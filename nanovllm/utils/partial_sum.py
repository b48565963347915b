"""Sums that are not added up yet: the kernel that reads one does it."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.utils.tensor_parallel import TensorParallel

Compute = Callable[[torch.Tensor | None], torch.Tensor]  # writes to its argument if there is one, and returns it


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


def sum_over_ranks(
    tp: TensorParallel, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, split_k: int = 1
) -> PartialSum:
    """The sum of what `compute` returns on every rank: [num_rows, width], or split_k > 1 parts of that shape.

    Ranks that read each other's memory (`tp.sum`) pass `compute` what it writes to, [split_k, num_rows, width] of it.
    """
    if hasattr(tp, "sum"):
        return tp.sum(compute, num_rows, width, dtype, split_k)
    return PartialSum(tp.all_reduce(compute(None)), split_k)


def max_split_k(tp: TensorParallel, num_rows: int) -> int:
    """How many parts a summand of `sum_over_ranks` may have at most."""
    if hasattr(tp, "sum"):
        return 2 if num_rows <= 32 else 1  # every rank reads the parts of all
    return 4 if tp.size == 1 else 1

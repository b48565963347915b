"""Defines sums that are not computed yet. Before a kernel uses such a sum, the kernel adds the summands."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.utils.tensor_parallel import TensorParallel

Compute = Callable[[torch.Tensor | None], torch.Tensor]  # writes its result to the argument, unless None is passed


class PartialSum:
    """A tensor [T, N] that is stored as summands.

    The code that reads the tensor adds the summands, ideally in a kernel that also does other work.

    parts: [T, N], or [split_k, T, N] if split_k > 1. The sum over the first dimension is the tensor [T, N].
    barrier: lets the reading kernel wait for the parts of other ranks (distributed/peer_memory.py), or is None.
    norm: None, or the arguments of a norm that is applied to the sum (see NormedSum in fused/norm_input.py).
    """

    __slots__ = ("device", "parts", "split_k")
    barrier: Any = None
    norm: Any = None

    def __init__(self, parts: torch.Tensor, split_k: int = 1):
        self.parts, self.split_k, self.device = parts, split_k, parts.device

    def __len__(self) -> int:
        return self.parts.shape[-2]

    @property
    def tensor(self) -> torch.Tensor | None:
        """The sum if there is a single part, else None."""
        return self.parts if self.split_k == 1 else None

    def reduce(self) -> torch.Tensor:
        """Return the sum [T, N]."""
        return self.parts if self.split_k == 1 else self.parts.sum(0)


def sum_over_ranks(
    tp: TensorParallel, compute: Compute, num_rows: int, width: int, dtype: torch.dtype, split_k: int = 1
) -> PartialSum:
    """Sum the result of `compute` over ranks.

    The result of `compute` is [num_rows, width], or [split_k, num_rows, width] if `split_k` > 1. If ranks read each
    other's memory (`tp.sum`), `compute` gets a tensor [split_k, num_rows, width] to write its result to.
    """
    if hasattr(tp, "sum"):
        return tp.sum(compute, num_rows, width, dtype, split_k)
    return PartialSum(tp.all_reduce(compute(None)), split_k)


def max_split_k(tp: TensorParallel, num_rows: int) -> int:
    """Return the largest `split_k` that `sum_over_ranks` accepts."""
    if hasattr(tp, "sum"):
        return 2 if num_rows <= 32 else 1  # small, because every rank reads the parts of all ranks
    return 4 if tp.size == 1 else 1

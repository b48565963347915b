"""The ranks that share a model."""
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among the ranks, and what they do together. `group` is the engine's own, never the default."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, what: str, total: int) -> int:
        """An equal share of `total`; ValueError where there is none."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size}: does not divide the {what} ({total})")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

"""A result that is still in parts, which its reader adds up, in the kernel that reads it if there is one."""

import torch
import torch.nn.functional as F

from nanovllm.kernels import triton_ops


class PartialSum:
    """A [T, N] tensor as a sum of parts.

    parts: [T, N], or with split_k > 1 [split_k, T, N], to be summed over the first dimension. A subclass in
        `distributed/`, PeerSum, has parts of several ranks.
    """

    __slots__ = ("parts", "split_k")

    def __init__(self, parts: torch.Tensor, split_k: int = 1):
        self.parts = parts
        self.split_k = split_k

    def __len__(self) -> int:
        """T."""
        return self.parts.shape[-2]

    @property
    def tensor(self) -> torch.Tensor | None:
        """The sum, if there is nothing left to add."""
        return self.parts if self.split_k == 1 else None

    def reduce(self) -> torch.Tensor:
        """The sum [T, N]."""
        return self.parts if self.split_k == 1 else self.parts.sum(0)

    def add_rms_norm(
        self, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The RMS norm of this sum (+ residual), and that total, both [T, N]; the total overwrites a residual."""
        if (ops := triton_ops(self.parts)) is None:
            total = self.reduce() if residual is None else residual.add_(self.reduce())
            return F.rms_norm(total, weight.shape, weight, eps), total
        if residual is None:
            total = self.reduce()
            return ops.rms_norm(total, weight, eps), total
        return ops.rms_norm(self.parts, weight, eps, residual, self.split_k), residual

"""Defines deferred norms. The kernel of the next matmul or norm may compute a deferred norm."""

from typing import Any

import torch

from nanovllm.kernels import operation
from nanovllm.layers.layernorm import RMSNorm, rms_norm
from nanovllm.utils.partial_sum import PartialSum


@operation
def add_rms_norm(
    x: PartialSum, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual, and the sum x + residual, both [T, N]. The sum may overwrite `residual`."""
    total = x.reduce() if residual is None else residual.add_(x.reduce())
    return rms_norm(total, weight, eps), total


class NormedSum(PartialSum):
    """A deferred norm of a sum, times a factor [1].

    The kernel of the next norm computes the norm of the sum, multiplies by the factor, and adds the residual. If `norm`
    is None, only the multiplication by the factor is deferred.
    """

    __slots__ = ("norm", "total")

    def __init__(self, total: PartialSum, norm: Any = None, factor: torch.Tensor | None = None):
        """`norm` is a FusedRMSNorm. Either `norm` or `factor` is given."""
        super().__init__(total.parts, total.split_k)
        self.total = total
        self.norm = (None, 0.0, factor) if norm is None else (norm.weight, norm.eps, factor)

    @property
    def tensor(self) -> None:
        """Always None, because the norm is not computed yet."""

    def times(self, factor: torch.Tensor) -> "NormedSum":
        """Set the factor, and return this object."""
        self.norm = *self.norm[:2], factor
        return self

    def reduce(self) -> torch.Tensor:
        """Compute the norm [T, N], times the factor."""
        weight, eps, factor = self.norm
        y = self.total.reduce() if weight is None else add_rms_norm(self.total, None, weight, eps)[0]
        return y if factor is None else y * factor

    def finish(self) -> PartialSum:
        """Return the result of `reduce` as a sum."""
        return PartialSum(self.reduce())


class NormInput:
    """A deferred norm of x + residual [T, N]."""

    __slots__ = ("device", "eps", "normed", "residual_before", "total", "weight", "x")

    def __init__(self, x: PartialSum, residual: torch.Tensor | None, norm: RMSNorm):
        self.x, self.residual_before = x, residual
        self.weight, self.eps, self.device = norm.weight, norm.eps, norm.weight.device
        self.normed: torch.Tensor | None = None
        self.total: torch.Tensor | None = None  # x + residual; set by the code that computes the norm

    def __len__(self) -> int:
        return len(self.x)

    def tensor(self) -> torch.Tensor:
        """Return the norm [T, N]. Only the first call computes the norm."""
        if self.normed is None:
            x, residual = (self.x, self.residual_before) if self.total is None else (PartialSum(self.total), None)
            self.normed, self.total = add_rms_norm(x, residual, self.weight, self.eps)
        return self.normed

    @property
    def residual(self) -> torch.Tensor:
        """The residual [T, N] for the next norm: x + residual. The sum may have overwritten the old residual."""
        if self.total is None:
            self.tensor()
        return self.total

    def summands(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return (x, residual), or None if x is still an unfinished sum.

        The residual is None if nothing must be added to x.
        """
        if self.total is not None:
            return self.total, None
        return None if self.x.tensor is None else (self.x.tensor, self.residual_before)


class Normed(NormInput):
    """The result of a norm that a plain layer has already computed."""

    def __init__(self, normed: torch.Tensor):
        normed = normed.contiguous()  # as kernels require
        self.x, self.residual_before = PartialSum(normed), None
        self.normed, self.device, self.total = normed, normed.device, normed  # so that no kernel computes a norm
        self.weight, self.eps = normed.new_empty(normed.shape[1]), 0.0  # only the shape counts

    def __len__(self) -> int:
        return len(self.tensor())

    def summands(self) -> None:
        return None

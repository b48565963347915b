"""Norms that are not computed yet: the layer that reads one may do it in one kernel with its product."""

import torch

from nanovllm.kernels import operation
from nanovllm.layers.layernorm import RMSNorm, rms_norm
from nanovllm.utils.partial_sum import PartialSum


@operation
def add_rms_norm(
    x: PartialSum, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and x + residual, both [T, N]; the latter may overwrite the residual."""
    total = x.reduce() if residual is None else residual.add_(x.reduce())
    return rms_norm(total, weight, eps), total


class NormInput:
    """The norm of x + residual, [T, N], which the layer that takes it may compute in one kernel with its product."""

    __slots__ = ("device", "eps", "normed", "residual_before", "total", "weight", "x")

    def __init__(self, x: PartialSum, residual: torch.Tensor | None, norm: RMSNorm):
        self.x, self.residual_before = x, residual
        self.weight, self.eps, self.device = norm.weight, norm.eps, norm.weight.device
        self.normed: torch.Tensor | None = None
        self.total: torch.Tensor | None = None  # x + residual; whoever computes the norm sets it

    def __len__(self) -> int:
        """T, the number of rows."""
        return len(self.x)

    def tensor(self) -> torch.Tensor:
        """The norm."""
        if self.normed is None:
            x, residual = (self.x, self.residual_before) if self.total is None else (PartialSum(self.total), None)
            self.normed, self.total = add_rms_norm(x, residual, self.weight, self.eps)
        return self.normed

    @property
    def residual(self) -> torch.Tensor:
        """x + residual: the residual of the next norm. It may have overwritten the one before."""
        if self.total is None:
            self.tensor()
        return self.total

    def summands(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """What is normed: x, and the residual if there is one to be added; None while x is in parts."""
        if self.total is not None:
            return self.total, None
        return None if self.x.tensor is None else (self.x.tensor, self.residual_before)


class Normed(NormInput):
    """The result of a norm that was computed already, by a plain layer."""

    def __init__(self, normed: torch.Tensor):
        normed = normed.contiguous()  # as kernels take it
        self.x, self.residual_before = PartialSum(normed), None
        self.normed, self.device, self.total = normed, normed.device, normed  # so that no kernel computes a norm
        self.weight, self.eps = normed.new_empty(normed.shape[1]), 0.0  # only the shape counts

    def __len__(self) -> int:
        return len(self.tensor())

    def summands(self) -> None:
        return None

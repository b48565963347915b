"""RMSNorm. If a residual is given, the layer first adds it to the input."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.utils.loader import default_weight_loader, parameter


@operation
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of x [..., N]. `weight` is [N]. The norm is computed in float32."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Computes `x / sqrt(mean(x^2) + eps) * weight` over the last dimension in float32 (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = parameter((hidden_size,), default_weight_loader)
        nn.init.ones_(self.weight)

    def rms_forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_rms_forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms_norm(total, self.weight, self.eps), total

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Return the norm of x [..., hidden_size] or, with a residual, the norm of `x + residual`, and this sum."""
        return self.rms_forward(x) if residual is None else self.add_rms_forward(x, residual)


def add_and_norm(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of `x + residual`, and `x + residual` itself. In a model's first layer, `residual` is None."""
    return (norm(x), x) if residual is None else norm(x, residual)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm for checkpoints that store `weight - 1`. The weight is float32: near 1, 16 bits are too coarse."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__(hidden_size, eps)
        self.weight = parameter((hidden_size,), self.weight_loader, torch.float32)
        nn.init.ones_(self.weight)

    def weight_loader(self, param: torch.Tensor, loaded_weight) -> torch.Tensor:
        return default_weight_loader(param, loaded_weight).add_(1)

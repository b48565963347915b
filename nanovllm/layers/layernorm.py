"""Root mean square norm, alone or with the residual addition in front of it."""
import torch
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.utils.loader import copy_weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the weight (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight.weight_loader = lambda weight: copy_weight(self.weight, weight, (size,))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """The norm of x; with a residual, the norm of their sum and that sum, in place of the residual."""
        if (ops := triton_ops(x)) is not None:
            out = ops.rms_norm(x, self.weight, self.eps, residual)
        else:
            x = x if residual is None else residual.add_(x)
            out = self.normalize(x)
        return out if residual is None else (out, residual)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight

"""Root mean square norm, alone or after the addition of the residual."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.layers.partial_sum import PartialSum
from nanovllm.utils.loader import copy_shard, parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.eps = eps
        self.weight = parameter((size,), partial(copy_shard, shape=(size,)), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        if (ops := triton_ops(x)) is not None:
            return ops.rms_norm(x.flatten(0, -2), self.weight, self.eps).view_as(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add_rms_norm(self, x: PartialSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual and x + residual, both [T, size]; the latter may overwrite the residual."""
        return x.add_rms_norm(self.weight, self.eps, residual)

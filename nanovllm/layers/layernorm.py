"""Root mean square norm, alone or with the residual addition in front of it."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.peer_memory import PeerSum
from nanovllm.kernels import triton_ops
from nanovllm.utils.loader import copy_shard, parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.eps = eps
        self.weight = parameter((size,), partial(copy_shard, shape=(size,)), dtype)

    def forward(self, x: torch.Tensor | PeerSum, residual: torch.Tensor | None = None):
        """The norm of x; with a residual, the norm of their sum and that sum, in place of the residual.

        x [T, size]; on CUDA also [parts, T, size], the parts of a sum, or a PeerSum, which is returned as a tensor as well.
        """
        if isinstance(x, PeerSum):
            return triton_ops(x.mine).sum_rms_norm(x.mine, x.meeting, self.weight, self.eps, residual)
        if (ops := triton_ops(x)) is not None:
            out = ops.rms_norm(x, self.weight, self.eps, residual)
        else:
            x = x if residual is None else residual.add_(x)
            out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out if residual is None else (out, residual)

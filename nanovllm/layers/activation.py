"""The gated activation of the feed-forward layers."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import triton_ops


class SiluAndMul(nn.Module):
    """[T, 2n] -> [T, n]: silu of the first half times the second (SwiGLU, arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (ops := triton_ops(x)) is not None:
            return ops.silu_and_mul(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

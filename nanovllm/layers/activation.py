"""The gated activation of the feed-forward layers."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation


@operation
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map x [T, 2 * n] to silu(x[:, :n]) * x[:, n:] (SwiGLU, arXiv:2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)

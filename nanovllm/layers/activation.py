"""The gated activation of the feed-forward layers."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation


@operation
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU of the first half by the second half: [T, 2n] -> [T, n] (SwiGLU, arXiv:2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)

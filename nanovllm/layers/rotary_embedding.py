"""Rotary position embedding (arXiv:2104.09864)."""
import torch
from torch import nn

from nanovllm.kernels import triton_ops


class RotaryEmbedding(nn.Module):
    """Turns the pair (x[i], x[i + head_dim / 2]) of every head by position times the i-th inverse frequency.

    One table of cosines and sines serves all layers: [max_len, head_dim] float32, cosines first.
    """

    def __init__(self, inv_freq: tuple[float, ...], scale: float, max_len: int):
        super().__init__()
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(inv_freq, dtype=torch.float32))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows of the table for positions [T]: looked up once a step, `apply_rotary` in every layer."""
        return self.cos_sin[positions]


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim], turned by cos_sin [T, head_dim]: in a new tensor, or by the kernel in place."""
    if (ops := triton_ops(x)) is not None:
        return ops.rotate(x, cos_sin)
    cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, -1)  # [T, 1, head_dim / 2]
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

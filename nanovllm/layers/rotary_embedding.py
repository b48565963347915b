"""Rotary position embedding (arXiv:2104.09864)."""

import torch
import torch.nn.functional as F
from torch import nn


class RotaryEmbedding(nn.Module):
    """Turns the pair (x[i], x[i + head_dim / 2]) of every head by position times the i-th inverse frequency.

    One float32 table [max_len, 2, head_dim] serves all layers: each position's cosines, and its sines with the sign
    that a half of x needs, so that the turn is x * cos + (x with its halves swapped) * sin.
    """

    def __init__(self, inv_freq: tuple[float, ...], scale: float, max_len: int):
        super().__init__()
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(inv_freq, dtype=torch.float32))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """The table's rows for positions [T]: looked up once a step, for `apply_rotary` in every layer."""
        return self.cos_sin.index_select(0, positions)


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim], turned by cos_sin [T, 2, head_dim]."""
    cos, sin = cos_sin.to(x.dtype).unsqueeze(2).unbind(1)  # [T, 1, head_dim]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def norm_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: torch.Tensor) -> torch.Tensor:
    """RMS norm of every head of x [T, heads, head_dim] with weight [heads, head_dim], then `apply_rotary`.

    Computed in float32 and rounded once.
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return apply_rotary(normed, cos_sin).to(x.dtype)

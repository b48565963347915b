"""Rotary position embedding (arXiv:2104.09864)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class RotaryEmbedding(nn.Module):
    """Rotates the pair (x[i], x[i + N / 2]) of every head by position times the i-th of N / 2 inverse frequencies.

    N is head_dim, or less: then the rest of a head is not rotated. One float32 table [max_len, 2, N] serves all layers.
    It holds each position's cosines, and its sines negated in their first half, so that the rotation is
    x * cos + (x with its halves swapped) * sin.
    """

    def __init__(self, inv_freq: tuple[float, ...], scale: float, max_len: int):
        super().__init__()
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(inv_freq, dtype=torch.float32))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """The table's rows [T, 2, N] for positions [T], which all layers of a step share."""
        return self.cos_sin.index_select(0, positions)


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim], of which the first N numbers are rotated by cos_sin [T, 2, N]."""
    cos, sin = cos_sin.to(x.dtype).unsqueeze(2).unbind(1)  # [T, 1, N]
    size = cos.shape[-1]
    rotated = torch.addcmul(x[..., :size] * cos, x[..., :size].roll(size // 2, -1), sin)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> torch.Tensor:
    """RMS norm of every head of x [T, heads, head_dim] with weight [heads, head_dim], then `apply_rotary`.

    There is no norm if `weight` is None. Computed in float32 and rounded once.
    """
    y = x.float()
    if weight is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=eps) * weight
    return apply_rotary(y, cos_sin).to(x.dtype)


class QKNormRope(NamedTuple):
    """What attention does to queries and keys before it stores keys: RMS norm of every head, and rotary embedding."""

    q_weight: torch.Tensor | None  # [head_dim], of the norm; None: no norm
    k_weight: torch.Tensor | None  # [head_dim]; None if and only if q_weight is
    eps: float  # of the norm
    cos_sin: torch.Tensor  # [T, 2, N], from RotaryEmbedding

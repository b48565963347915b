"""Rotary position embedding (arXiv:2104.09864)."""

from pathlib import Path

import torch
from torch import nn

from nanovllm.utils.checks import check_int, check_real
from nanovllm.utils.rope_scaling import inverse_frequencies, scaled_rope


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + N / 2]) of x [T, heads, N]. `cos` and `sin` have shape [T, 1, N / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates the first N numbers of every head. The angle of pair `i` is `position * inv_freq[i]`.

    All layers share one float32 table [max_position, N] of cosines, then sines.
    """

    def __init__(self, inv_freq: tuple[float, ...], scale: float, max_position: int):
        """`scale` multiplies cosines and sines, in YaRN and LongRoPE."""
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(inv_freq, dtype=torch.float32))
        table = torch.cat((angles.cos(), angles.sin()), -1) * scale
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [T, heads, head_dim] and k [T, kv_heads, head_dim], rotated by the tokens' positions [T]."""
        cos, sin = self.cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T, 1, N / 2]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = self.cos_sin_cache.shape[1]
        rotated = apply_rotary_emb(x[..., :size], cos, sin)
        return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)


def get_rope(
    head_size: int, rotary_dim: int, max_position: int, base: float, rope_scaling: dict | None = None
) -> RotaryEmbedding:
    """Make a RotaryEmbedding for the first `rotary_dim` elements of each head.

    `rope_scaling` is the entry `rope_scaling` of config.json: a "rope_type" and its parameters. Raises ValueError if
    the entry is invalid.
    """
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: must be even, and at most head_size={head_size}")
    check_int("max_position", max_position, low=1)
    check_real("base", base, low=1e-6, high=1e30)
    inv_freq, scale = inverse_frequencies(base, rotary_dim), 1.0
    if rope_scaling is not None:
        parameters = dict(rope_scaling)
        kind = parameters.pop("rope_type", None) or parameters.pop("type", "default")
        lengths = {"max_position_embeddings": max_position}
        try:
            inv_freq, scale, _ = scaled_rope(kind, base, parameters, lengths, rotary_dim, Path("rope_scaling"))
        except KeyError as error:
            raise ValueError(f"rope_scaling: has no {error}") from error
    return RotaryEmbedding(tuple(inv_freq.tolist()), scale, max_position)

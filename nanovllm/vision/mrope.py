"""Implements rotary embedding by temporal, vertical and horizontal positions (interleaved MRoPE, arXiv:2511.21631)."""

import torch

from nanovllm.layers.rotary_embedding import RotaryEmbedding


class MRotaryEmbedding(RotaryEmbedding):
    """Rotates each pair of columns of a head by the position on one of three axes.

    Pairs 1, 4, 7, ... use the vertical position. Pairs 2, 5, 8, ... use the horizontal position. Other pairs use the
    temporal position. `mrope_section` contains the number of pairs per axis. The three positions of a text token are
    equal.
    """

    def __init__(
        self, inv_freq: tuple[float, ...], scale: float, max_position: int, mrope_section: tuple[int, int, int]
    ):
        super().__init__(inv_freq, scale, max_position)
        axes = torch.zeros(len(inv_freq), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * mrope_section[axis] : 3] = axis
        self.register_buffer("axes", axes.repeat(2), persistent=False)  # the axis of each column of a table

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate as RotaryEmbedding does. `positions` is [T], or [3, T] if the step has images."""
        cos, sin = self.look_up(self.cos_sin_cache, positions).unsqueeze(1).chunk(2, -1)  # [T, 1, N / 2]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def look_up(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rows of a table [max_position, ..., N]. For each column, `axes` selects one of three positions."""
        if positions.dim() == 1:
            return table.index_select(0, positions)
        by_axis = [table.index_select(0, axis) for axis in positions]
        return torch.where(self.axes == 0, by_axis[0], torch.where(self.axes == 1, by_axis[1], by_axis[2]))

"""The base class of fused forms, the forms of rotary embedding and RMSNorm, and what fused forms pass each other."""

from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.partial_sum import PartialSum


class Rope(NamedTuple):
    """The positions of a step's tokens, with cos and sin, for all layers."""

    positions: torch.Tensor  # [T]
    cos_sin: torch.Tensor | None  # [T, 2, N] float32, see FusedRotaryEmbedding


class Fused:
    """The base class of forms. A form comes before the class of a module (utils/replace.py), and uses its attributes.

    `forward` is for plain neighbours: it takes and returns what the plain `forward` does. Parts of a layer also have
    `fused` for fused neighbours. It takes a norm that may not be computed yet, and returns a sum that may not be added
    yet. FusedRMSNorm makes such a norm, and FusedRotaryEmbedding has `rows` instead.
    """

    what = ""  # what is fused, for `nanovllm show-fused`

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether this form can compute the parts of a module whose `forward` it replaces."""
        return True

    def prepare(self) -> None:
        """Called once, after the module has become this form and its weights are loaded."""


class FusedRotaryEmbedding(Fused):
    """Adds a table of cos and sin in the order of the kernels. FusedModel looks them up once per step.

    The table [max_position, 2, N] has the cosines of each position, and its sines, which are negated in their first
    half. So the rotation of x is x * cos + (x with its halves swapped) * sin.
    """

    what = "the lookup of cos and sin: once a step, if the model is fused"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module)._rotate is RotaryEmbedding._rotate

    def prepare(self) -> None:
        cos, sin = self.cos_sin_cache.chunk(2, -1)  # type: ignore[attr-defined]
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self.register_buffer("kernel_table", table, persistent=False)  # type: ignore[attr-defined]

    def rows(self, positions: torch.Tensor) -> Rope:
        return Rope(positions, self.kernel_table.index_select(0, positions))  # type: ignore[attr-defined]


class FusedRMSNorm(Fused):
    """Replaces `RMSNorm.forward`. The layer that reads the norm of a PartialSum computes it."""

    what = "the sum of what ranks or splits of a product have computed, with the residual and the norm"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        own = type(module).rms_forward, type(module).add_rms_forward
        return own == (RMSNorm.rms_forward, RMSNorm.add_rms_forward)

    def forward(self: Any, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None) -> Any:
        if isinstance(x, PartialSum):
            return NormInput(x, residual, self)
        return super().forward(x, residual)  # type: ignore[misc]


def rope_at(rotary_emb: Any, positions: torch.Tensor) -> Rope:
    """Look up the Rope for a form between plain layers, whose attention may have another rotary embedding, or none."""
    if not isinstance(rotary_emb, FusedRotaryEmbedding):
        return Rope(positions, None)
    rope = rotary_emb.rows(positions)
    positions.clone()  # an ordinary launch after the lookup, so that kernels may read rope early: see FusedModel
    return rope


def shared_rope(module: nn.Module) -> Any:
    """Return the rotary embedding of a module's attention layers if they share one; None otherwise."""
    found = {part.rotary_emb for part in module.modules() if hasattr(part, "rotary_emb")}
    return found.pop() if len(found) == 1 else None


def takes_fused(module: nn.Module) -> bool:
    """Whether neighbours call `fused` of a module. A module with hooks is called like a plain one, so that they run."""
    return isinstance(module, Fused) and not (module._forward_hooks or module._forward_pre_hooks)


def run_fused(module: nn.Module, x: NormInput, *rope: Rope) -> PartialSum:
    """Call a part of a layer between two norms, fused or plain. Only attention gets `rope`."""
    if takes_fused(module):
        return module.fused(x, *rope)  # type: ignore[operator]
    positions = [x.positions for x in rope]
    return PartialSum(module(*positions, x.tensor()).contiguous())

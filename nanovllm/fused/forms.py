"""What a fused form is, and what is passed between them."""

from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.partial_sum import PartialSum


class Rope(NamedTuple):
    """Where the tokens of a step are, for all layers."""

    positions: torch.Tensor  # [T]
    cos_sin: torch.Tensor | None  # [T, 2, N] float32, see FusedRotaryEmbedding


class Fused:
    """Comes before the class of a module (utils/replace.py), whose attributes it uses.

    `forward` takes and returns what that of the plain module does, for plain neighbours. Parts of a layer also have
    `fused`, for fused neighbours: it takes a norm that is possibly not computed yet, and returns a sum that is
    possibly not added up yet. FusedRMSNorm makes such a norm, and FusedRotaryEmbedding has `rows`.
    """

    what = ""  # what is fused

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether a module whose `forward` is known has parts that this form computes as well."""
        return True

    def prepare(self) -> None:
        """Called once, when the module has become this form and its weights are loaded."""


class FusedRotaryEmbedding(Fused):
    """Cosines and sines in the order of the kernels. FusedModel looks them up once for all layers of a step.

    The table [max_position, 2, N] has each position's cosines, and its sines negated in their first half, so that the
    rotation of x is x * cos + (x with its halves swapped) * sin.
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
    """In the place of `RMSNorm.forward`: the norm of a PartialSum is computed by the layer that reads it."""

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
    """For a form between plain layers. A plain attention may have another rotary embedding, or none."""
    if not isinstance(rotary_emb, FusedRotaryEmbedding):
        return Rope(positions, None)
    rope = rotary_emb.rows(positions)
    positions.clone()  # an ordinary launch after the lookup, so that kernels may read it early: see FusedModel
    return rope


def shared_rope(module: nn.Module) -> Any:
    """The rotary embedding of all attention layers of a module, if they share one; else None."""
    found = {part.rotary_emb for part in module.modules() if hasattr(part, "rotary_emb")}
    return found.pop() if len(found) == 1 else None


def takes_fused(module: nn.Module) -> bool:
    """Whether a neighbour calls `fused` of a module. One with hooks is called as PyTorch does it, like a plain one."""
    return isinstance(module, Fused) and not (module._forward_hooks or module._forward_pre_hooks)


def run_fused(module: nn.Module, x: NormInput, *rope: Rope) -> PartialSum:
    """A part of a layer between two norms, fused or plain; attention gets `rope`."""
    if takes_fused(module):
        return module.fused(x, *rope)  # type: ignore[operator]
    positions = [x.positions for x in rope]
    return PartialSum(module(*positions, x.tensor()).contiguous())

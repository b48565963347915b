"""Defines the base class of fused forms, the forms of RMSNorm and rotary embeddings, and helpers that call forms."""

from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.partial_sum import PartialSum


class Rope(NamedTuple):
    """The positions of a step's tokens, with the cosines and sines that all layers use."""

    positions: torch.Tensor  # [T]
    cos_sin: torch.Tensor | None  # [T, 2, N] float32, see FusedRotaryEmbedding


class Fused:
    """The base class of fused forms.

    A form overrides methods of a module, and uses the module's attributes (utils/replace.py). A plain neighbouring
    layer calls a form's `forward`. A fused neighbouring layer calls `fused`, which takes the result of a FusedRMSNorm
    and returns a sum. FusedRMSNorm may defer the norm, and `fused` may return an unfinished sum. FusedRotaryEmbedding
    defines `rows` instead of `fused`.
    """

    what = ""  # what is fused, for `nanovllm show-fused`

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return True

    def prepare(self) -> None:
        """Prepare the module. `fuse` calls this method once, after the weights are loaded."""


class FusedRotaryEmbedding(Fused):
    """Adds a table of cosines and sines in the order that kernels use. FusedModel reads the table once per step.

    The table [max_position, 2, N] contains N cosines and N sines for each position. The first half of the sines is
    negated, so the rotation of x is x * cos + (x with its halves swapped) * sin.
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


class FusedMRotaryEmbedding(FusedRotaryEmbedding):
    """Replaces `MRotaryEmbedding.forward`. Positions are [T] or, in steps with images, [3, T]."""

    def rows(self, positions: torch.Tensor) -> Rope:
        return Rope(positions, self.look_up(self.kernel_table, positions))  # type: ignore[attr-defined]


class FusedNoRope(FusedRotaryEmbedding):
    """Replaces `NoRope.forward`. All cosines are 1, and all sines are 0."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return True

    def prepare(self) -> None:
        """There is no table."""

    def rows(self, positions: torch.Tensor) -> Rope:
        cos = torch.ones(len(positions), 1, 2, dtype=torch.float32, device=positions.device)
        return Rope(positions, torch.cat((cos, 0 * cos), 1))


class FusedRMSNorm(Fused):
    """Replaces `RMSNorm.forward`. The norm of a PartialSum is deferred.

    The layer that uses the result computes the norm.
    """

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
    """Return the `Rope` for a fused layer whose neighbouring layers are plain.

    Without a fused rotary embedding, `Rope.cos_sin` is None.
    """
    if not isinstance(rotary_emb, FusedRotaryEmbedding):
        return Rope(positions, None)
    rope = rotary_emb.rows(positions)
    positions.clone()  # an ordinary launch after the lookup, so that kernels may read rope early: see FusedModel
    return rope


def has_method(module: nn.Module, path: str) -> bool:
    """Return False if a layer's method was replaced. `path` names the original method as "module:Class.name"."""
    name = path.rsplit(".", 1)[1]
    return name not in vars(module) and getattr(type(module), name, None) is resolve_name(path)


def has_hooks(*modules: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def takes_fused(module: nn.Module) -> bool:
    """Return whether neighbours may call `module.fused`.

    The module must have no hooks, because `fused` would skip hooks.
    """
    return isinstance(module, Fused) and not has_hooks(module)


def run_fused(module: nn.Module, x: NormInput, *rope: Rope) -> PartialSum:
    """Call the part of a layer between two norms, such as attention. The called part may be fused or plain.

    Only attention takes `rope`.
    """
    if takes_fused(module):
        return module.fused(x, *rope)  # type: ignore[operator]
    positions = [x.positions for x in rope]
    return PartialSum(module(*positions, x.tensor()).contiguous())

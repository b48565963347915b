"""Defines fused forms of decoder layers that normalize or scale the outputs of attention and MLP."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.fused.decoder import FusedDecoderLayer, copied, select
from nanovllm.fused.forms import FusedRMSNorm, Rope, has_method, run_fused, takes_fused
from nanovllm.fused.norm_input import Normed, NormedSum, NormInput
from nanovllm.kernels import operation
from nanovllm.utils.partial_sum import PartialSum

FEED_FORWARD = "nanovllm.models.gemma3_text:Gemma3DecoderLayer.feed_forward"
FEED_EXPERTS = "nanovllm.models.shared.gemma4_layers:Gemma4ExpertsLayer.feed_forward"


def normed_sum(x: PartialSum, norm: nn.Module) -> PartialSum:
    """Return the norm of a sum. A fused norm without hooks is deferred. Any other norm is computed at once."""
    return NormedSum(x, norm) if takes_fused(norm) else PartialSum(norm(x.reduce()).contiguous())


class FusedGemma3Layer(FusedDecoderLayer):
    """Replaces `Gemma3DecoderLayer.forward`."""

    what = "norms and sums between the products"
    # the norms after attention, before the MLP and after the MLP
    norms: ClassVar = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return all(isinstance(getattr(module, name), FusedRMSNorm) for name in ("input_layernorm", *cls.norms))

    def fused(
        self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope, rows: torch.Tensor | None = None
    ) -> tuple[PartialSum, torch.Tensor]:
        after_attention, before_mlp, after_mlp = (getattr(self, name) for name in self.norms)
        normed = self.input_layernorm(x, residual)
        x, residual = select(rows, self.mix(normed, rope), normed.residual)
        normed = before_mlp(normed_sum(x, after_attention), residual)
        return self.finish(normed_sum(self.feed(normed), after_mlp), normed.residual)

    def feed(self: Any, x: NormInput) -> PartialSum:
        if has_method(self, FEED_FORWARD):
            return run_fused(self.mlp, x)
        return PartialSum(self.feed_forward(x.tensor(), x.residual).contiguous())

    def finish(self: Any, x: PartialSum, residual: torch.Tensor) -> tuple[PartialSum, torch.Tensor]:
        return x, residual


class FusedGemma4Layer(FusedGemma3Layer):
    """Replaces `Gemma4DecoderLayer.forward`. The layer multiplies its output and the residual by a factor."""

    def feed(self: Any, x: NormInput) -> PartialSum:
        if not has_method(self, FEED_EXPERTS):
            return super().feed(x)
        norm, more_norm = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        y = normed_sum(run_fused(self.mlp, x), norm).reduce()
        rows = self.pre_feedforward_layernorm_2(x.residual).contiguous()
        mixed = self.tp.all_reduce(self.experts(rows, *self.router(x.residual)).contiguous())
        return PartialSum(add(normed_sum(PartialSum(mixed), more_norm), y if takes_fused(norm) else copied(y)))

    def finish(self: Any, x: PartialSum, residual: torch.Tensor) -> tuple[PartialSum, torch.Tensor]:
        x = x.times(self.layer_scalar) if isinstance(x, NormedSum) else PartialSum(x.reduce() * self.layer_scalar)
        return x, residual * self.layer_scalar


class FusedGraniteLayer(FusedDecoderLayer):
    """Replaces `GraniteDecoderLayer.forward`. The layer multiplies the outputs of attention and MLP by a factor."""

    def prepare(self: Any) -> None:
        weight = self.input_layernorm.weight
        self.register_buffer("factor_tensor", torch.full((1,), self.factor, device=weight.device), persistent=False)

    def fused(
        self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope, rows: torch.Tensor | None = None
    ) -> tuple[PartialSum, torch.Tensor]:
        normed, scaled = self.input_layernorm(x, residual), partial(NormedSum, factor=self.factor_tensor)
        x, residual = select(rows, self.mix(normed, rope), normed.residual)
        normed = self.post_attention_layernorm(scaled(x), residual)
        return scaled(run_fused(self.mlp, normed)), normed.residual


class FusedGlm4Layer(FusedGemma3Layer):
    """Replaces `Glm4DecoderLayer.forward`."""

    norms: ClassVar = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

    def feed(self: Any, x: NormInput) -> PartialSum:
        return run_fused(self.mlp, x)


def add(x: PartialSum, residual: torch.Tensor) -> torch.Tensor:
    """Add `x` to `residual` [T, N] in place, and return `residual`."""
    return residual.add_(x.reduce()) if x.norm is None else add_normed(x, residual)


@operation
def add_normed(x: PartialSum, residual: torch.Tensor) -> torch.Tensor:
    """Compute `add` for a NormedSum."""
    return residual.add_(x.reduce())


def input_of(module: nn.Module, residual: torch.Tensor) -> Normed:
    """Return the input of a module: the residual. A plain module gets a copy, because `add` overwrites the residual."""
    return Normed(residual if takes_fused(module) else copied(residual))


class FusedOlmo3Layer(FusedDecoderLayer):
    """Replaces `Olmo3DecoderLayer.forward`. The layer has norms only after attention and after the MLP."""

    what = "norms with the sums after them"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = module.post_attention_layernorm, module.post_feedforward_layernorm
        return all(isinstance(norm, FusedRMSNorm) for norm in norms)

    def fused(
        self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope, rows: torch.Tensor | None = None
    ) -> tuple[PartialSum, torch.Tensor]:
        residual = x.reduce() if residual is None else add(x, residual)
        x, residual = select(rows, self.mix(input_of(self.self_attn, residual), rope), residual)
        residual = add(normed_sum(x, self.post_attention_layernorm), residual)
        x = run_fused(self.mlp, input_of(self.mlp, residual))
        return normed_sum(x, self.post_feedforward_layernorm), residual

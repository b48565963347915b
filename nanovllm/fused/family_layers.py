"""Defines fused forms of decoder layers in which the outputs of attention and MLP get norms before they are added."""

from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.fused.decoder import FusedDecoderLayer
from nanovllm.fused.forms import FusedRMSNorm, Rope, run_fused
from nanovllm.fused.norm_input import Normed, NormedSum
from nanovllm.kernels import operation
from nanovllm.utils.partial_sum import PartialSum

PLAIN_FEED_FORWARD = "nanovllm.models.gemma3_text:Gemma3DecoderLayer.feed_forward"


class FusedGemma3Layer(FusedDecoderLayer):
    """Replaces `Gemma3DecoderLayer.forward`."""

    what = "norms and sums between the products"
    # the norms after attention, before the MLP and after the MLP
    norms: ClassVar = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return all(isinstance(getattr(module, name), FusedRMSNorm) for name in ("input_layernorm", *cls.norms))

    def prepare(self: Any) -> None:
        self.has_only_mlp = type(self).feed_forward is resolve_name(PLAIN_FEED_FORWARD)

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        after_attention, before_mlp, after_mlp = (getattr(self, name) for name in self.norms)
        normed = self.input_layernorm(x, residual)
        normed = before_mlp(NormedSum(self.mix(normed, rope), after_attention), normed.residual)
        if self.has_only_mlp:
            x = run_fused(self.mlp, normed)
        else:
            x = PartialSum(self.feed_forward(normed.tensor(), normed.residual))
        return NormedSum(x, after_mlp), normed.residual


class FusedGemma4Layer(FusedGemma3Layer):
    """Replaces `Gemma4DecoderLayer.forward`, which multiplies the results by a factor."""

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        y, residual = super().fused(x, residual, rope)
        return NormedSum(y.total, self.post_feedforward_layernorm, self.layer_scalar), residual.mul_(self.layer_scalar)


class FusedGlm4Layer(FusedGemma3Layer):
    """Replaces `Glm4DecoderLayer.forward`."""

    norms: ClassVar = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

    def prepare(self: Any) -> None:
        self.has_only_mlp = True


@operation
def add_normed(x: NormedSum, residual: torch.Tensor) -> torch.Tensor:
    """Add the norm `x` to `residual` [T, N] in place, and return `residual`."""
    return residual.add_(x.reduce())


class FusedOlmo3Layer(FusedDecoderLayer):
    """Replaces `Olmo3DecoderLayer.forward`. There are no other norms than those after attention and MLP."""

    what = "norms with the sums after them"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = module.post_attention_layernorm, module.post_feedforward_layernorm
        return all(isinstance(norm, FusedRMSNorm) for norm in norms)

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        if residual is None:
            residual = x.reduce()
        else:
            residual = add_normed(x, residual) if isinstance(x, NormedSum) else residual.add_(x.reduce())
        residual = add_normed(NormedSum(self.mix(Normed(residual), rope), self.post_attention_layernorm), residual)
        return NormedSum(run_fused(self.mlp, Normed(residual)), self.post_feedforward_layernorm), residual

"""Defines fused forms of Gemma's decoder layers, which have norms before and after attention and MLP."""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from nanovllm.fused.decoder import FusedDecoderLayer
from nanovllm.fused.forms import FusedRMSNorm, Rope, run_fused
from nanovllm.fused.norm_input import NormedSum
from nanovllm.utils.partial_sum import PartialSum

PLAIN_FEED_FORWARD = "nanovllm.models.gemma3_text:Gemma3DecoderLayer.feed_forward"


class FusedGemma3Layer(FusedDecoderLayer):
    """Replaces `Gemma3DecoderLayer.forward`."""

    what = "norms and sums between the products"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = "input", "post_attention", "pre_feedforward", "post_feedforward"
        return all(isinstance(getattr(module, f"{name}_layernorm"), FusedRMSNorm) for name in norms)

    def prepare(self: Any) -> None:
        self.has_only_mlp = type(self).feed_forward is resolve_name(PLAIN_FEED_FORWARD)

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        normed = self.input_layernorm(x, residual)
        x = NormedSum(self.mix(normed, rope), self.post_attention_layernorm)
        normed = self.pre_feedforward_layernorm(x, normed.residual)
        if self.has_only_mlp:
            x = run_fused(self.mlp, normed)
        else:
            x = PartialSum(self.feed_forward(normed.tensor(), normed.residual))
        return NormedSum(x, self.post_feedforward_layernorm), normed.residual


class FusedGemma4Layer(FusedGemma3Layer):
    """Replaces `Gemma4DecoderLayer.forward`, which multiplies the results by a factor."""

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        y, residual = super().fused(x, residual, rope)
        return NormedSum(y.total, self.post_feedforward_layernorm, self.layer_scalar), residual.mul_(self.layer_scalar)

"""Defines fused forms of draft heads (models/shared/head_models.py)."""

from typing import Any

import torch
from torch import nn

from nanovllm.fused.decoder import FusedDecoderLayer
from nanovllm.fused.forms import Fused, FusedRMSNorm, FusedRotaryEmbedding, Rope, run_fused
from nanovllm.fused.norm_input import Normed
from nanovllm.utils.partial_sum import PartialSum


def shared_rope(module: nn.Module) -> Any:
    """Return the rotary embedding that all attention layers of a module share, or None."""
    found = {part.rotary_emb for part in module.modules() if hasattr(part, "rotary_emb")}
    return found.pop() if len(found) == 1 else None


class FusedEagle3Layer(FusedDecoderLayer):
    """Replaces `Eagle3Layer.forward`."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and isinstance(module.hidden_norm, FusedRMSNorm)

    def fused(self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope) -> tuple[PartialSum, torch.Tensor]:
        """Compute the layer for embeddings `x` and hidden states `residual`, both [T, hidden].

        `residual` may be overwritten.
        """
        assert residual is not None
        normed = self.hidden_norm(PartialSum(residual)).tensor()
        both = torch.cat((self.input_layernorm(x).tensor(), normed), -1)
        x = run_fused(self.self_attn, Normed(both), rope)
        after = self.post_attention_layernorm(x, normed if self.norm_before_residual else residual)
        return run_fused(self.mlp, after), after.residual


class FusedEagle3Head(Fused):
    """Replaces `Eagle3Head.forward`, and may overwrite `hidden_states`."""

    what = "the last sum with the residual"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = isinstance(module.norm, FusedRMSNorm)
        rope, (layer,) = shared_rope(module), module.layers  # type: ignore[misc]
        return norms and isinstance(layer, Fused) and isinstance(rope, FusedRotaryEmbedding)

    def forward(
        self: Any, embeddings: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        rope = self.layers[0].self_attn.rotary_emb.rows(positions)  # first, as in FusedModel
        x, residual = self.layers[0].fused(PartialSum(embeddings), hidden_states, rope)
        return residual + x.reduce()


class FusedMtpHead(FusedEagle3Head):
    """Replaces `MtpHead.forward`."""

    what = "the last sum with the norm"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = module.pre_fc_norm_embedding, module.pre_fc_norm_hidden
        return super().matches(module) and all(isinstance(norm, FusedRMSNorm) for norm in norms)

    def forward(
        self: Any, embeddings: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        rope = self.layers[0].self_attn.rotary_emb.rows(positions)  # first: the concatenation is an ordinary launch
        of_tokens, of_model = PartialSum(embeddings), PartialSum(hidden_states)
        normed = self.pre_fc_norm_embedding(of_tokens), self.pre_fc_norm_hidden(of_model)
        x = self.fc(torch.cat([x.tensor() for x in normed], -1))
        return self.norm(*self.layers[0].fused(PartialSum(x), None, rope)).tensor()

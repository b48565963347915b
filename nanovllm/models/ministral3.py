"""Ministral 3: a Llama that scales queries up with their position, so that attention stays sharp in long contexts."""

from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.llama import LlamaAttention, LlamaForCausalLM
from nanovllm.utils.checks import check_choice, check_real
from nanovllm.utils.nested_names import IMAGE_PREFIXES

# `rope_parameters` if config.json has none
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class QueryScale(NamedTuple):
    """The `ModelConfig.details`. A query at position `p` is multiplied by `1 + beta * log(1 + p // length)`."""

    beta: float
    length: float


class ScaledRotaryEmbedding(nn.Module):
    def __init__(self, rotary_emb: RotaryEmbedding, scale: QueryScale):
        super().__init__()
        self.rotary_emb, self.scale = rotary_emb, scale

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.rotary_emb(positions, q, k)
        scale = 1 + self.scale.beta * torch.log1p(torch.floor(positions / self.scale.length))
        return q * scale[:, None, None].to(q.dtype), k


class Ministral3ForCausalLM(LlamaForCausalLM):
    may_be_nested, unused_prefixes = True, IMAGE_PREFIXES
    defaults: ClassVar = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        attention = LlamaAttention(config, rotary_emb)
        if config.details is not None:
            attention.rotary_emb = ScaledRotaryEmbedding(rotary_emb, config.details)
        return attention

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        check_choice(f"{file}: sliding_window", raw.get("sliding_window"), (None,))
        rope = (raw.get("rope_parameters") or {}) | (raw.get("rope_scaling") or {})
        if not (beta := rope.get("llama_4_scaling_beta")):
            return {}
        name = "original_max_position_embeddings"
        length = check_real(f"{file}: {name}", rope.get(name), low=1.0, high=1e30)
        return {"details": QueryScale(check_real(f"{file}: llama_4_scaling_beta", beta, 0.0, 1e3), length)}

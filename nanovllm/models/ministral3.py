"""Ministral 3: a Llama whose queries grow with their position, which keeps attention sharp in long contexts."""

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
    """The value of `ModelConfig.details` for Ministral 3.

    A query at position `p` is multiplied by `1 + beta * log(1 + p // length)`.
    """

    beta: float
    length: float

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors [T] for positions [T], in float32."""
        return 1 + self.beta * torch.log1p(torch.floor(positions / self.length))


class Ministral3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.query_scale: QueryScale = config.details

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.rotary_emb(positions, q, k)
        q = q * self.query_scale.at(positions)[:, None, None].to(q.dtype)
        return self.o_proj(self.attn(q, k, v))


class Ministral3ForCausalLM(LlamaForCausalLM):
    may_be_nested, unused_prefixes = True, IMAGE_PREFIXES
    defaults: ClassVar = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        scale = config.details
        is_scaled = scale is not None and config.max_position_embeddings > scale.length  # below, the factor is 1
        return (Ministral3Attention if is_scaled else LlamaAttention)(config, rotary_emb)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        check_choice(f"{file}: sliding_window", raw.get("sliding_window"), (None,))
        rope = (raw.get("rope_parameters") or {}) | (raw.get("rope_scaling") or {})
        if not (beta := rope.get("llama_4_scaling_beta")):
            return {}
        name = "original_max_position_embeddings"
        length = check_real(f"{file}: {name}", rope.get(name), low=1.0, high=1e30)
        return {"details": QueryScale(check_real(f"{file}: llama_4_scaling_beta", beta, 0.0, 1e3), length)}

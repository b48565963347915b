"""Granite: a Llama with separate factors for embeddings, attention scores, residual branches and logits."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.layers.embed_head import ScaledEmbedding
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm.utils.checks import check_real


class Factors(NamedTuple):
    """The value of `ModelConfig.details` for Granite. Each field has the name of its entry in config.json."""

    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float


class GraniteDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        self.factor = config.details.residual_multiplier

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states if residual is None else hidden_states + residual
        x = x + self.self_attn(positions, self.input_layernorm(x)) * self.factor
        return self.mlp(self.post_attention_layernorm(x)) * self.factor, x


class GraniteForCausalLM(LlamaForCausalLM):
    reads = Factors._fields

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        factor = config.details.embedding_multiplier
        self.model.embed_tokens = ScaledEmbedding(self.model.embed_tokens, factor)

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        attention = cls.make_attention(config, rotary_emb)
        attention.attn.scale = config.details.attention_multiplier
        return GraniteDecoderLayer(config, attention, cls.make_mlp(config, layer_index))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states) / self.config.details.logits_scaling

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        factors = (check_real(f"{file}: {name}", raw.get(name, 1.0), 1e-6, 1e6) for name in Factors._fields)
        return LlamaForCausalLM.read_config(raw, file) | {"details": Factors(*factors)}

"""Gemma 4, dense: full layers have larger heads and use keys as values; values have a norm, and layers a scalar."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.gemma3_text import GeluAndMul, Gemma3DecoderLayer, Gemma3ForCausalLM, read_gemma
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3MLP
from nanovllm.models.shared.full_layers import QKParallelLinear, read_full_layers
from nanovllm.utils.checks import check_choice
from nanovllm.utils.loader import default_weight_loader, parameter


class Gemma4Attention(Qwen3Attention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, keys_are_values: bool):
        super().__init__(config, rotary_emb)
        if keys_are_values:
            self.qkv_proj = QKParallelLinear(config)
        self.num_values = 0 if keys_are_values else self.num_kv_heads
        self.eps = config.rms_norm_eps

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_values], dim=1)
        v = v if self.num_values else k
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        v = F.rms_norm(v.float(), (self.head_dim,), eps=self.eps).to(v.dtype)
        return self.o_proj(self.attn(q, k, v))


class Gemma4DecoderLayer(Gemma3DecoderLayer):
    norm_class = RMSNorm

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        self.layer_scalar = parameter((1,), default_weight_loader)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().forward(positions, hidden_states, residual)
        return x * self.layer_scalar, residual * self.layer_scalar


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    # transformers' defaults
    defaults: ClassVar = Gemma3ForCausalLM.defaults | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rotary_emb = RotaryEmbedding(*config.details.full.rope, config.max_position_embeddings)
        for layer, size in zip(self.model.layers, config.details.sizes):
            if size is None:
                layer.self_attn.rotary_emb = rotary_emb

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        full, is_full = config.details.full, config.details.sizes[layer_index] is None
        if is_full:
            config = replace(config, head_dim=full.head_dim, num_key_value_heads=full.num_key_value_heads)
        mlp = Qwen3MLP(config)
        mlp.act_fn = GeluAndMul()
        attention = Gemma4Attention(config, rotary_emb, is_full and full.keys_are_values)
        return Gemma4DecoderLayer(config, attention, mlp)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        refused = {"hidden_size_per_layer_input": "per-layer embeddings", "enable_moe_block": "experts next to the MLP"}
        refused |= {"num_kv_shared_layers": "layers that share a cache", "use_double_wide_mlp": "MLPs of two sizes"}
        for name, what in refused.items():
            if raw.get(name):
                raise ValueError(f"{file}: {name}={raw[name]!r}: {what} of Gemma 4 are not supported")
        # text attends causally with "vision", too
        check_choice(f"{file}: use_bidirectional_attention", raw.get("use_bidirectional_attention"), (None, "vision"))
        fields = read_gemma(raw | {"use_bidirectional_attention": None}, file, 6)
        full = read_full_layers(raw, fields["details"].sizes, file)
        return fields | {"details": fields["details"]._replace(scale=1.0, full=full)}

"""Gemma 4: Gemma 3 with norms of values, and a factor for each layer.

Layers without a window have larger heads, and may use their keys as values.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.gemma3_text import Gemma3ForCausalLM, read_gemma
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.models.shared.gemma4_config import max_table_views, read_details, read_moe
from nanovllm.models.shared.gemma4_layers import Gemma4PerLayerModel, PartialQKVLinear, layer_class, norm_without_weight
from nanovllm.utils.checks import check_choice
from nanovllm.utils.context import get_context


class Gemma4Attention(Qwen3Attention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, parts: str):
        super().__init__(config, rotary_emb)
        if parts != "qkv":
            self.qkv_proj = PartialQKVLinear(config, parts)
        self.eps = config.rms_norm_eps

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_heads + self.num_kv_heads]
        v = qkv[:, -self.num_kv_heads :]  # the keys, if there are no other values
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(self.attn(q, k, norm_without_weight(v, self.eps)))


class SharedCacheAttention(Gemma4Attention):
    """Attention without keys and values of its own. The layer uses the submodule `attn` of an earlier layer."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb, "q")
        del self.k_norm

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q = self.q_norm(self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        q, _ = self.rotary_emb(positions, q, q[:, :0])
        context = get_context().of_table(self.attn.table)
        return self.o_proj(self.attn.backend.attend(q, self.attn.cache, context).flatten(1))


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    norm_class = RMSNorm
    # transformers' defaults
    defaults: ClassVar = Gemma3ForCausalLM.defaults | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        more, layers = config.details.more, self.model.layers
        rotary_emb = RotaryEmbedding(*more.rope, config.max_position_embeddings)
        for i, (layer, size, source) in enumerate(zip(layers, config.details.sizes, more.sources)):
            layer.self_attn.attn = layers[source].self_attn.attn
            if size is None:
                layer.self_attn.rotary_emb = rotary_emb
            if source != i:  # published checkpoints contain these tensors, too
                self.unused_prefixes += tuple(f"model.layers.{i}.self_attn.{x}" for x in ("k_proj", "v_proj", "k_norm"))
        if more.per_layer_size:
            self.model = Gemma4PerLayerModel(self.model, config)

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        more, is_full = config.details.more, config.details.sizes[layer_index] is None
        if is_full:
            config = replace(config, head_dim=more.head_dim, num_key_value_heads=more.num_key_value_heads)
        if more.sources[layer_index] != layer_index:
            config = replace(config, intermediate_size=more.shared_intermediate_size)
            attention = SharedCacheAttention(config, rotary_emb)
        else:
            attention = Gemma4Attention(config, rotary_emb, "qk" if is_full and more.keys_are_values else "qkv")
        return layer_class(config)(config, attention, cls.make_mlp(config, layer_index))

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        # with "vision", text still attends causally
        check_choice(f"{file}: use_bidirectional_attention", raw.get("use_bidirectional_attention"), (None, "vision"))
        fields = read_gemma(raw | {"use_bidirectional_attention": None}, file, 6)
        sizes = (*fields["details"].sizes[:-1], None)  # as in transformers, the last layer has no window
        details = fields["details"]._replace(sizes=sizes, scale=1.0, more=read_details(raw, sizes, file))
        fields |= {"details": details, "max_table_views": max_table_views(raw, details)}
        return fields | {"moe": read_moe(raw, file)}

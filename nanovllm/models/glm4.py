"""GLM-4-0414: a Llama with norms before and after attention and MLP. RoPE rotates adjacent pairs in half of a head."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.layernorm import RMSNorm, add_and_norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm.utils.merged_tensors import WHOLE


class InterleavedRotaryEmbedding(RotaryEmbedding):
    """Rotates the pairs `(x[2 * i], x[2 * i + 1])`.

    The class RotaryEmbedding rotates the pairs `(x[i], x[i + N / 2])` instead.
    """

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = self.cos_sin_cache.shape[1]
        even, odd = x[..., 0:size:2].float(), x[..., 1:size:2].float()
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
        return torch.cat((rotated, x[..., size:]), -1)


class Glm4DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        x = self.post_self_attn_layernorm(self.self_attn(positions, x))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(LlamaForCausalLM):
    defaults: ClassVar = {
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
    }
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_up_proj": ("gate_up_proj", WHOLE),
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        rotary_emb = InterleavedRotaryEmbedding(config.rope_inv_freq, config.rope_scale, config.max_position_embeddings)
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = rotary_emb

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        return Glm4DecoderLayer(config, cls.make_attention(config, rotary_emb), cls.make_mlp(config, layer_index))

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return {"qkv_bias": raw["attention_bias"]}

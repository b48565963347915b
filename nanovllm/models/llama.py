"""Llama 2 and 3, and other models in their format. The architecture is Qwen3 without norms of queries and keys."""

from pathlib import Path

from torch import nn

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM
from nanovllm.utils.checks import check_choice


class LlamaAttention(Qwen3Attention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.q_norm = self.k_norm = nn.Identity()


class LlamaForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        return LlamaAttention(config, rotary_emb)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        # more than 1 means to split matmuls, so that they round as in training
        check_choice(f"{file}: pretraining_tp", raw.get("pretraining_tp") or 1, (1,))
        bias = raw.get("attention_bias", False)
        return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}

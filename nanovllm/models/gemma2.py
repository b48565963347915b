"""Gemma 2: like Gemma 3, but with soft caps and without norms of q and k. Every second layer has a sliding window."""

from pathlib import Path
from typing import ClassVar

from torch import nn

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.gemma3_text import Gemma3ForCausalLM, read_gemma
from nanovllm.models.llama import LlamaAttention


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    may_be_nested = False
    # transformers' defaults
    defaults: ClassVar = Gemma3ForCausalLM.defaults | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        return LlamaAttention(config, rotary_emb)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return read_gemma(raw, file, 2, scales_local=True)  # one rotary embedding for all layers

"""Gemma 2: a Gemma 3 without norms of q and k, and with soft caps. Every other layer has a sliding window."""

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
    defaults: ClassVar = {
        "hidden_act": "gelu_pytorch_tanh",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        return LlamaAttention(config, rotary_emb)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return read_gemma(raw, file, 2)

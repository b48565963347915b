"""Qwen3, dense. The docstrings of other families describe how they differ from Qwen3.

T is the number of tokens in a step. The tokens of all sequences in the step are concatenated. In shapes, `num_heads`,
`num_kv_heads` and the intermediate size are per rank. Hidden states are equal on all ranks.

On CUDA, fused versions in fused/ replace the `forward` methods of this file. Fused and unfused results differ only by
rounding.
"""

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__()
        total_num_heads, total_num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, total_num_heads, total_num_kv_heads, bias=config.qkv_bias
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.num_heads, self.head_dim, self.head_dim**-0.5, self.num_kv_heads, config.sliding_window
        )
        self.o_proj = RowParallelLinear(total_num_heads * self.head_dim, config.hidden_size, bias=config.o_bias)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv_heads, head_dim]
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        o = self.attn(q, k, v)  # [T, heads * head_dim]
        return self.o_proj(o)  # [T, hidden_size]


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [size] * 2, bias=bias)
        self.act_fn: nn.Module = SiluAndMul()
        self.down_proj = RowParallelLinear(size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)  # [T, 2 * intermediate_size]
        return self.down_proj(self.act_fn(gate_up))  # [T, hidden_size]


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual). The layer's output is x + residual, and the next norm computes this sum.

        `residual` is None in the first layer. The next layer may overwrite the returned residual.
        """
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, layers: list[nn.Module], norm: nn.Module):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map token ids [T] and positions [T] to hidden states [T, hidden_size]."""
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen3ForCausalLM(nn.Module):
    norm_class: ClassVar[type[nn.Module]] = RMSNorm  # of the last norm
    hidden_acts: ClassVar = ("silu",)  # supported values of `hidden_act` in config.json
    # a checkpoint's module -> (the merged module that holds it, its shard id there)
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        rotary_emb = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, config.max_position_embeddings)
        layers = [self.make_layer(config, i, rotary_emb) for i in range(config.num_hidden_layers)]
        self.model = Qwen3Model(config, layers, self.norm_class(config.hidden_size, config.rms_norm_eps))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        """Make a layer. Other families override this method, or only `make_attention` or `make_mlp`."""
        return Qwen3DecoderLayer(config, cls.make_attention(config, rotary_emb), cls.make_mlp(config, layer_index))

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        return Qwen3Attention(config, rotary_emb)

    @staticmethod
    def make_mlp(config: ModelConfig, layer_index: int) -> nn.Module:
        return Qwen3MLP(config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        bias = raw.get("attention_bias", False)
        return {"qkv_bias": bias, "o_bias": bias}

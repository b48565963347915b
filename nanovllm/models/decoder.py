"""A decoder of attention and feed-forward layers: how they are connected, and how a checkpoint's names map onto them.

The families are subclasses. ModelConfig says which biases a model has, and whether queries and keys have norms.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import NormInput, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import QKNormRope, RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.utils.tensor_parallel import PartialSum, TensorParallel


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TensorParallel):
        super().__init__()
        head_dim, num_heads, num_kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        hidden_size, dtype = config.hidden_size, config.linear_dtype
        self.qkv_proj = QKVParallelLinear(hidden_size, head_dim, num_heads, num_kv_heads, config.qkv_bias, tp, dtype)
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, config.o_bias, tp, dtype)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, config.dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, config.dtype) if config.qk_norm else None
        heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attn = Attention(*heads, head_dim, backend, config.sliding_window)

    def forward(self, x: NormInput, cos_sin: torch.Tensor) -> PartialSum:
        q_norm, k_norm = self.q_norm, self.k_norm
        norms = (None, None, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        return self.o_proj(self.attn(x, QKNormRope(*norms, cos_sin), self.qkv_proj))


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [(size, tp), (size, tp)], bias, config.linear_dtype)
        self.act_fn: nn.Module = SiluAndMul()
        self.down_proj = RowParallelLinear(size, hidden_size, bias, tp, config.linear_dtype)

    def forward(self, x: NormInput) -> PartialSum:
        return self.down_proj(self.gate_up_proj(x, self.act_fn))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, mlp: nn.Module, backend: AttentionBackend, tp: TensorParallel):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.self_attn = DecoderAttention(config, backend, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp

    def forward(self, x: PartialSum, residual: torch.Tensor | None, cos_sin: torch.Tensor):
        """What the layer adds to the residual stream, and the stream before that addition."""
        normed = self.input_layernorm(x, residual)
        x = self.self_attn(normed, cos_sin)
        normed = self.post_attention_layernorm(x, normed.residual)
        return self.mlp(normed), normed.residual


class DecoderModel(nn.Module):
    def __init__(self, config: ModelConfig, layers: Iterable[nn.Module], max_len: int, tp: TensorParallel):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp, config.dtype)
        self.rotary_emb = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, max_len)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # The lookup comes first: attention may read cos_sin while the kernel before it still runs, which is safe only
        # because the embedding, an ordinary launch, starts after the lookup is complete (kernels/dependent_launch.py).
        cos_sin = self.rotary_emb(positions)
        x, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, cos_sin)
        return self.norm(x, residual).tensor()


class DecoderForCausalLM(nn.Module):
    """Token ids and positions [T] to hidden states [T, hidden_size], of which `compute_logits` makes logits."""

    hidden_acts: ClassVar = ("silu",)  # values of `hidden_act` in config.json that the class computes
    # a checkpoint's module -> the merged module that holds it, and its shard id there
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, max_len: int, backend: AttentionBackend, tp: TensorParallel):
        super().__init__()
        self.config = config
        layers = (self.make_layer(config, i, backend, tp) for i in range(config.num_hidden_layers))
        self.model = DecoderModel(config, layers, max_len, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def make_layer(cls, config: ModelConfig, i: int, backend: AttentionBackend, tp: TensorParallel) -> nn.Module:
        return DecoderLayer(config, cls.make_mlp(config, i, tp), backend, tp)

    @staticmethod
    def make_mlp(config: ModelConfig, layer_index: int, tp: TensorParallel) -> nn.Module:
        """A layer's feed-forward part; families with other ones replace this."""
        return DecoderMLP(config, tp)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(token_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor | None = None) -> torch.Tensor:
        return self.lm_head(hidden_states, sampling_params)

"""OLMo 3: norms after attention and MLP, norms over all heads of q and k, and sliding windows in 3 of 4 layers."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.models.shared.windows import WindowsForCausalLM, read_windows
from nanovllm.utils.construction import get_construction
from nanovllm.utils.loader import Shard, parameter


class RowRMSNorm(nn.Module):
    """A norm over all heads of a token. Each rank has some of the heads, and the ranks add up the sums of squares."""

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        """`num_heads` is the total over all ranks."""
        super().__init__()
        self.tp = get_construction().tp
        self.heads, self.size, self.eps = self.tp.for_heads(num_heads), num_heads * head_dim, eps
        self.weight = parameter((self.heads.shard_size("heads", num_heads) * head_dim,), self.weight_loader)
        nn.init.ones_(self.weight)

    def weight_loader(self, param: torch.Tensor, loaded_weight) -> torch.Tensor:
        return Shard((self.size,), self.heads.local_slice(self.size)).copy(param, loaded_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [T, heads * head_dim], which contains this rank's heads."""
        y = x.float()
        total = self.tp.all_reduce(y.square().sum(-1, keepdim=True))
        num_copies = self.tp.size // self.heads.size  # several ranks may hold the same head
        y = y * torch.rsqrt(total / (num_copies * self.size) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Olmo3Attention(Qwen3Attention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.q_norm = RowRMSNorm(config.num_attention_heads, self.head_dim, config.rms_norm_eps)
        self.k_norm = RowRMSNorm(config.num_key_value_heads, self.head_dim, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = self.qkv_proj(hidden_states).split(sizes, dim=1)
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class Olmo3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), as Qwen3DecoderLayer does. The layer's output is x + residual."""
        x = hidden_states if residual is None else hidden_states + residual
        x = x + self.post_attention_layernorm(self.self_attn(positions, x))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo3ForCausalLM(WindowsForCausalLM):
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        return Olmo3DecoderLayer(config, Olmo3Attention(config, rotary_emb), cls.make_mlp(config, layer_index))

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        bias = raw.get("attention_bias", False)
        return {"qkv_bias": bias, "o_bias": bias, **read_windows(raw, file, 4)}

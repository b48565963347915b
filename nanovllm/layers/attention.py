"""Attention over the paged cache: from the qkv product to the input of the output projection."""

import torch
from torch import nn

from nanovllm.layers.attention_backends import AttentionBackend
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.rotary_embedding import QKNormRope
from nanovllm.utils.context import get_context


def cache_format(kv_cache_dtype: str) -> type[KVCache]:
    """The class of the layers' caches for this setting."""
    if kv_cache_dtype == "auto":
        return KVCache
    from nanovllm.quantization.fp8_cache import FP8KVCache

    return FP8KVCache


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, with its optional q and k norm, rotary embedding and cache.

    `kv_cache` is this layer's part of the engine's cache; the ModelRunner sets it once it knows its size.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend):
        """The numbers of heads are those of this rank."""
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.backend = backend
        self.kv_cache = KVCache(torch.empty(2, 0))

    def forward(self, qkv: torch.Tensor, qk_norm_rope: QKNormRope) -> torch.Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv_heads, head_dim]
        return self.backend.attend_qkv(qkv, qk_norm_rope, self.kv_cache, get_context()).flatten(1)

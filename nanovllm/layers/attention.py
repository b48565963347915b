"""Attention over the paged cache: from the qkv product to the input of the output projection."""

from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.layers.attention_backends import AttentionBackend
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.rotary_embedding import QKNormRope
from nanovllm.utils.context import get_context


class PagedKV(NamedTuple):
    """The spec of attention: a key and a value of each token and head, in blocks that a sequence's table lists."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens behind it stay in their blocks, and are not read
    of_states = False

    def tensors(self, num_layers: int, num_blocks: int, config: Any) -> tuple[torch.Tensor, ...]:
        shape = (2, num_layers, num_blocks, config.kvcache_block_size, self.num_kv_heads, self.head_dim)
        return _cache_type(config.kv_cache_dtype).tensors(shape, config.dtype)

    def make(self, parts: list[torch.Tensor], config: Any) -> KVCache:
        cache = _cache_type(config.kv_cache_dtype)(*parts)
        cache.window = self.window
        return cache


def _cache_type(kv_cache_dtype: str) -> type[KVCache]:
    if kv_cache_dtype == "auto":
        return KVCache
    from nanovllm.quantization.fp8_cache import FP8KVCache

    return FP8KVCache


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, with its optional q and k norm, rotary embedding and cache."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend, window: int | None = None
    ):
        """The numbers of heads are those of this rank; `window` is how many tokens one attends to, itself included.

        Only the plain backend reads it. For others, Config bounds the length by ModelConfig.sliding_window.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.backend = backend
        self.cache = KVCache(torch.empty(2, 0))

    def cache_spec(self) -> PagedKV:
        return PagedKV(self.num_kv_heads, self.head_dim, self.window)

    def forward(self, qkv: torch.Tensor, qk_norm_rope: QKNormRope) -> torch.Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv_heads, head_dim]
        return self.backend.attend_qkv(qkv, qk_norm_rope, self.cache, get_context()).flatten(1)

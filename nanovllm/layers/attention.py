"""The attention layer, which reads a paged KV cache."""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.sdpa import SDPABackend
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.kernels import operation
from nanovllm.utils.context import get_context


@operation
def store_kvcache(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] to cache slots [T]. Only device kernels skip slot -1 (padding)."""
    cache.store_kvcache(slot_mapping.long(), k, v)


class Attention(nn.Module):
    """Causal grouped-query attention. Query head `h` reads key-value head `h // (num_heads / num_kv_heads)`."""

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int, window: int | None = None):
        """Head counts are per rank. `window` is the number of tokens that a token attends to, including itself."""
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.scale, self.window = scale, window
        # some families set these, too: see AttentionSpec
        self.soft_cap: float | None = None
        self.sinks: torch.Tensor | None = None
        self.table = 0  # the block table that this layer uses: see cache/window_tables.py
        # the runner replaces both
        self.backend: AttentionBackend = SDPABackend()
        self.cache = KVCache(torch.empty(2, 0))

    @property
    def k_cache(self) -> torch.Tensor:
        """The cached keys, a tensor [blocks, block_size, num_kv_heads, head_dim]."""
        return self.cache.k

    @property
    def v_cache(self) -> torch.Tensor:
        return self.cache.v

    def cache_spec(self) -> AttentionSpec:
        return AttentionSpec(self.num_kv_heads, self.head_dim, self.window, self.scale, self.soft_cap, self.sinks)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, num_kv_heads, head_dim]. Map q [T, num_heads, head_dim] to [T, num_heads * head_dim]."""
        context = get_context().of_table(self.table)
        store_kvcache(k, v, self.cache, context.slot_mapping)
        return self.backend.attend(q, self.cache, context).flatten(1)

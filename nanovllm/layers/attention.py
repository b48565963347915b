"""Attention over the paged cache, whichever backend computes it."""

import torch
from torch import nn

from nanovllm.layers.attention_backends import AttentionBackend
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal grouped-query attention of one layer.

    `k_cache` and `v_cache` [blocks, block_size, kv_heads, head_dim] are this layer's part of the engine's cache;
    the ModelRunner sets them once it knows their size.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, backend: AttentionBackend):
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.backend = backend
        self.k_cache = self.v_cache = torch.empty(0, dtype=torch.float32)

    def store_kvcache(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write this step's keys and values [T, kv_heads, head_dim] to their slots, of which none is -1."""
        slots = get_context().slot_mapping.long()
        self.k_cache.flatten(0, 1).index_copy_(0, slots, k)
        self.v_cache.flatten(0, 1).index_copy_(0, slots, v)

    def fuses_qk_norm_rope(self, qkv: torch.Tensor) -> bool:
        """Whether this step's `forward` would rather have qkv, with what there is to do with it."""
        return not get_context().is_prefill and self.backend.fuses_qk_norm_rope(len(qkv), self.num_kv_heads, qkv.device)

    def forward(self, q: torch.Tensor, new: tuple | None = None) -> torch.Tensor:
        """q [T, heads, head_dim] against all that is stored, this step's keys and values included -> the same shape.

        Where `fuses_qk_norm_rope`, q is qkv [T, heads + 2 kv_heads, head_dim], and `new` the arguments of `norm_rope_store`
        between qkv and the caches.
        """
        context = get_context()
        if context.is_prefill:
            return self.backend.prefill(q, self.k_cache, self.v_cache, context)
        return self.backend.decode(q, self.k_cache, self.v_cache, context, new)

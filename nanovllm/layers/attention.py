"""Attention over the paged cache, whichever backend computes it."""
import torch
from torch import nn

from nanovllm.layers.attention_backends import AttentionBackend
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal grouped-query attention of one layer: stores this step's keys and values, then attends to all.

    `k_cache` and `v_cache` [blocks, block_size, kv_heads, head_dim] are this layer's part of the engine's cache;
    the ModelRunner sets them once it knows their size.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, backend: AttentionBackend):
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.backend = backend
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        context = get_context()
        self.backend.store_kvcache(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        attend = self.backend.prefill if context.is_prefill else self.backend.decode
        return attend(q, self.k_cache, self.v_cache, context)

"""Attention over the paged cache: from the qkv product to the input of the output projection."""

from types import ModuleType

import torch
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.layers.attention_backends import AttentionBackend
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.rotary_embedding import QKNormRope, norm_rope
from nanovllm.utils.context import get_context


def cache_format(kv_cache_dtype: str) -> type[KVCache]:
    """What each layer's `kv_cache` is for this setting."""
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
        if (ops := triton_ops(qkv)) is not None:
            return self._forward_by_kernels(ops, qkv, qk_norm_rope).flatten(1)
        q, k, v = self._norm_rope(qkv, qk_norm_rope)
        self.store_kvcache(k, v)
        return self.attend(q).flatten(1)

    def _norm_rope(self, qkv: torch.Tensor, qk_norm_rope: QKNormRope) -> tuple[torch.Tensor, ...]:
        """Queries [T, heads, head_dim], and keys and values [T, kv_heads, head_dim]."""
        q_weight, k_weight, eps, cos_sin = qk_norm_rope
        weight, num_qk = None, self.num_heads + self.num_kv_heads
        if q_weight is not None:
            weight = torch.cat((q_weight.expand(self.num_heads, -1), k_weight.expand(self.num_kv_heads, -1)))
        # queries and keys in one call: small operations on a CPU cost the same whatever their size
        qk = norm_rope(qkv[:, :num_qk], weight, eps, cos_sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_qk:]

    def store_kvcache(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write this step's keys and values [T, kv_heads, head_dim] to their slots, none of which may be -1."""
        self.kv_cache.store(get_context().slot_mapping.long(), k, v)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, heads, head_dim] against all stored keys, those of this step included -> the same shape."""
        return self.backend.attend(q, self.kv_cache, get_context())

    def _forward_by_kernels(self, ops: ModuleType, qkv: torch.Tensor, qk_norm_rope: QKNormRope) -> torch.Tensor:
        """Norm, rope and store in one kernel, which the backend may fuse with the attention of a decode step."""
        context, backend, cache = get_context(), self.backend, self.kv_cache
        is_decode = not context.has_chunks and context.tokens_per_row == 1  # drafts attend to keys of the same step
        if is_decode and backend.fuses_qk_norm_rope(len(qkv), self.num_kv_heads, qkv.device):
            return backend.decode_qkv(qkv, qk_norm_rope, cache, context)
        q = ops.norm_rope_store(qkv, *qk_norm_rope, context.slot_mapping, cache.k, cache.v, cache.scales)
        return self.attend(q)

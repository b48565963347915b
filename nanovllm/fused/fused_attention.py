"""Fuses attention with the preceding norm, qkv matmul, q and k norms, rotary embedding and cache store."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.cache.kv_cache import KVCache
from nanovllm.fused.forms import Fused, FusedRMSNorm, FusedRotaryEmbedding, Rope, rope_at
from nanovllm.fused.fused_linear import are_known, partial_sum, product
from nanovllm.fused.norm_input import Normed, NormInput
from nanovllm.kernels import operation
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sigmoid_gate import sigmoid_gate
from nanovllm.utils.context import get_context
from nanovllm.utils.partial_sum import PartialSum


class QKNormRope(NamedTuple):
    """The parameters of the query and key norms, and the table of the rotary embedding."""

    q_weight: torch.Tensor | None  # [head_dim]; None: no norm
    k_weight: torch.Tensor | None  # [head_dim]; None if and only if q_weight is None
    eps: float  # of the norm
    cos_sin: torch.Tensor  # [T, 2, N], see FusedRotaryEmbedding


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first N elements of each head of x [T, heads, head_dim] by `cos_sin` [T, 2, N]."""
    cos, sin = cos_sin.to(x.dtype).unsqueeze(2).unbind(1)  # [T, 1, N]
    size = cos.shape[-1]
    rotated = torch.addcmul(x[..., :size] * cos, x[..., :size].roll(size // 2, -1), sin)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> torch.Tensor:
    """Apply the RMS norm and then `apply_rotary` to each head of x [T, heads, head_dim].

    The norm's `weight` is [heads, head_dim], or None for no norm. The result is computed in float32 and rounded once.
    """
    y = x.float()
    if weight is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=eps) * weight
    return apply_rotary(y, cos_sin).to(x.dtype)


@operation
def norm_rope_and_store(
    qkv: torch.Tensor, qk_norm_rope: QKNormRope, slot_mapping: torch.Tensor, cache: KVCache
) -> torch.Tensor:
    """Normalize and rotate queries and keys, store keys and values, and return the queries [T, heads, head_dim].

    `qkv` is [T, heads + 2 * kv_heads, head_dim], and `slot_mapping` [T] contains cache slots. Kernels do not store
    padding, whose slot is -1. This plain definition does not support padding.
    """
    q_weight, k_weight, eps, cos_sin = qk_norm_rope
    num_kv_heads = cache.k.shape[2]
    num_qk = qkv.shape[1] - num_kv_heads
    num_heads, weight = num_qk - num_kv_heads, None
    if q_weight is not None:
        weight = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))
    qk = norm_rope(qkv[:, :num_qk], weight, eps, cos_sin)
    cache.store_kvcache(slot_mapping.long(), qk[:, num_heads:], qkv[:, num_qk:])
    return qk[:, :num_heads]


def attend(attn: Attention, x: Any, qkv_proj: LinearBase | None, qk_norm_rope: QKNormRope) -> torch.Tensor:
    """Apply the deferred norm `x`, the qkv matmul and attention. Return a tensor [T, heads * head_dim].

    If `qkv_proj` is None, `x` [T, (heads + 2 * kv_heads) * head_dim] is already the result of the qkv matmul. For small
    decode batches, one kernel computes q and k norms, RoPE, cache store and attention. For large prefills, one kernel
    computes qkv matmul, norms, RoPE and cache store.
    """
    backend, cache, context = attn.backend, attn.cache, get_context().of_table(attn.table)
    kernels, slots = backend.ops, context.slot_mapping
    q: Any = NotImplemented
    if kernels and context.is_prefill and qkv_proj is not None:
        q = kernels.qkv_norm_rope_store(x, qkv_proj, qk_norm_rope, slots, cache)
    if q is not NotImplemented:
        return backend.attend(q, cache, context).flatten(1)
    qkv = (x if qkv_proj is None else product(qkv_proj, x)).unflatten(-1, (-1, attn.head_dim))
    is_decode = not context.is_prefill and context.tokens_per_row == 1  # drafts attend to keys of the same step
    if kernels and is_decode and kernels.fuses_qk_norm_rope(len(qkv), attn.num_kv_heads, qkv.device):
        seqs = context.context_lens, context.block_tables, context.max_context_len
        return kernels.decode_attention(qkv, cache, *seqs, norm_rope_inputs=(*qk_norm_rope, slots)).flatten(1)
    q = norm_rope_and_store(qkv, qk_norm_rope, slots, cache)
    return backend.attend(q, cache, context).flatten(1)


class FusedAttention(Fused):
    """Replaces `Qwen3Attention.forward`."""

    what = "norms of q and k, RoPE, store of k and v (few decodes: with attention; over 8,192 rows on Hopper: with qkv)"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms: Any = module.q_norm, module.k_norm
        has_norms = all(isinstance(norm, FusedRMSNorm) for norm in norms) and norms[0].eps == norms[1].eps
        has_none = all(type(norm) is nn.Identity for norm in norms)
        return (has_norms or has_none) and cls.matches_except_norms(module)

    @staticmethod
    def matches_except_norms(module: Any) -> bool:
        has_rope = isinstance(module.rotary_emb, FusedRotaryEmbedding)
        return type(module.attn) is Attention and has_rope and are_known(module.qkv_proj, output=module.o_proj)

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fused(Normed(hidden_states), rope_at(self.rotary_emb, positions)).reduce()

    def fused(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        return partial_sum(self.o_proj, attend(self.attn, x, self.qkv_proj, self._norms(rope)))

    def _norms(self: Any, rope: Rope) -> QKNormRope:
        if isinstance(self.q_norm, RMSNorm):
            return QKNormRope(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, rope.cos_sin)
        return QKNormRope(None, None, 0.0, rope.cos_sin)


class FusedGatedAttention(FusedAttention):
    """Replaces `GatedAttention.forward`. The result of the qkv matmul starts with the gates."""

    def fused(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        gate, qkv = product(self.qkv_proj, x).tensor_split((self.num_heads * self.head_dim,), 1)
        attended = attend(self.attn, qkv, None, self._norms(rope))
        return partial_sum(self.o_proj, sigmoid_gate(attended, gate))

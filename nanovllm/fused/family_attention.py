"""Defines fused forms of attention for model families that process q, k or v differently from Qwen3."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.fused.forms import Rope, has_method
from nanovllm.fused.fused_attention import FusedAttention, QKNormRope, attend
from nanovllm.fused.fused_linear import partial_sum, product
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.layers.layernorm import rms_norm
from nanovllm.utils.context import get_context
from nanovllm.utils.partial_sum import PartialSum

ROW_NORM = "nanovllm.models.olmo3:RowRMSNorm.forward"


@operation
def norm_heads(x: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """Normalize the last `count` heads of x [T, heads, head_dim] in place, without a weight, and return x."""
    heads = x[:, -count:]
    heads.copy_(F.rms_norm(heads.float(), heads.shape[-1:], eps=eps))
    return x


class FusedGemma4Attention(FusedAttention):
    """Replaces `Gemma4Attention.forward`. Values get a norm without a weight, even if they are copies of the keys."""

    what = "norms of q and k, RoPE, store of k and v (few decodes: with attention); norm of v"

    def fused(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        qkv = product(self.qkv_proj, x).unflatten(-1, (-1, self.head_dim))
        if qkv.shape[1] == self.num_heads + self.num_kv_heads:  # keys are values
            qkv = torch.cat((qkv, qkv[:, -self.num_kv_heads :]), 1)
        norm_heads(qkv, self.num_kv_heads, self.eps)
        return partial_sum(self.o_proj, attend(self.attn, qkv.flatten(1), None, self._norms(rope)))


class FusedMinistral3Attention(FusedAttention):
    """Replaces `Ministral3Attention.forward`. Queries are multiplied by their scales before the rotation, not after."""

    what = "RoPE, store of k and v (few decodes: with attention)"

    def fused(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        qkv, plans = product(self.qkv_proj, x), get_context().plans
        if (scales := plans.get(FusedMinistral3Attention)) is None:  # in the first layer of a step
            scales = plans[FusedMinistral3Attention] = self.query_scale.at(rope.positions)[:, None].to(qkv.dtype)
        qkv[:, : self.num_heads * self.head_dim].mul_(scales)
        return partial_sum(self.o_proj, attend(self.attn, qkv, None, self._norms(rope)))


@operation
def norm_columns(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float) -> torch.Tensor:
    """Normalize the first `len(weights[0])` columns and the next `len(weights[1])` columns of x [T, N] in place.

    Return x.
    """
    q, k, _ = x.tensor_split((len(weights[0]), len(weights[0]) + len(weights[1])), 1)
    for part, weight in zip((q, k), weights):
        part.copy_(rms_norm(part, weight, eps))
    return x


class FusedOlmo3Attention(FusedAttention):
    """Replaces `Olmo3Attention.forward`, on a single rank."""

    what = "norms of q and k; RoPE and store of k and v (few decodes: with attention)"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = module.q_norm, module.k_norm
        has_norms = all(has_method(norm, ROW_NORM) and norm.tp.size == 1 for norm in norms)
        return has_norms and norms[0].eps == norms[1].eps and cls.matches_except_norms(module)

    def fused(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        qkv = norm_columns(product(self.qkv_proj, x), (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps)
        return partial_sum(self.o_proj, attend(self.attn, qkv, None, QKNormRope(None, None, 0.0, rope.cos_sin)))

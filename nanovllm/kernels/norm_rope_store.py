"""From the qkv product to attention in one pass: optional q and k norm, rotary embedding, store into the cache."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch

NORM_ROPE_INPUTS = (
    "q_weight_ptr",
    "k_weight_ptr",
    "cos_sin_ptr",
    "slot_mapping_ptr",
)  # complete before the qkv product


@triton.jit
def norm_rope(x, x_swapped, cos, sin, eps, HAS_NORM: tl.constexpr):
    """RMS norm, if there is one, and rotary embedding of the rows of x [R, D], rounded as they are stored.

    x_swapped is x with its halves swapped. cos and sin are [D] or [R, D] and already contain the weights of the norm.
    """
    y, y_swapped = x.to(tl.float32), x_swapped.to(tl.float32)
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(y * y, 1) / x.shape[1] + eps)[:, None]
        y = (y * cos + y_swapped * sin) * norm
    else:
        y = y * cos + y_swapped * sin
    return y.to(x.dtype)


@dependent_kernel(early=NORM_ROPE_INPUTS)
@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HEAD_DIM)[None, :]
    swapped = (d + HEAD_DIM // 2) % HEAD_DIM
    is_q = head < HEADS
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    stored = slot + 0 * head >= 0
    is_k = stored & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = stored & (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    cos_ptr = cos_sin_ptr + token * (2 * HEAD_DIM)
    cos = tl.load(cos_ptr + d)
    sin = tl.load(cos_ptr + HEAD_DIM + d)
    if HAS_NORM:
        cos = cos * tl.where(is_q, tl.load(q_weight_ptr + d), tl.load(k_weight_ptr + d))
        sin = sin * tl.where(is_q, tl.load(q_weight_ptr + swapped), tl.load(k_weight_ptr + swapped))
    if PDL:
        gdc_wait()
    row = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(row + d, is_q | is_k | is_v, 0.0)
    y = norm_rope(x, tl.load(row + swapped, is_q | is_k, 0.0), cos, sin, eps, HAS_NORM)
    tl.store(q_ptr + (token * HEADS + head) * HEAD_DIM + d, y, is_q)
    tl.store(k_cache_ptr + (slot * KV_HEADS + head - HEADS) * HEAD_DIM + d, y, is_k)
    tl.store(v_cache_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM + d, x, is_v)


def norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """qkv [T, heads + 2 kv_heads, head_dim], contiguous -> normed and rotated queries [T, heads, head_dim].

    Normed and rotated keys, and values, are stored at slot_mapping [T] of the caches [blocks, block_size, kv_heads,
    head_dim]; those of slot -1 are not stored. Weights [head_dim], or None without a norm; cos_sin [T, 2, head_dim]
    float32: cosines, and sines that are negated in their first half. head_dim is a power of two.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    heads = num_rows - 2 * kv_heads
    q = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        rows = 16
        launch(_norm_rope_store_kernel, (num_tokens, triton.cdiv(num_rows, rows)), qkv.device)(
            qkv,
            q_weight,
            k_weight,
            cos_sin,
            slot_mapping,
            q,
            k_cache,
            v_cache,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            ROWS=rows,
            HAS_NORM=q_weight is not None,
            num_warps=4 if num_tokens < 1024 else 1,
        )
    return q

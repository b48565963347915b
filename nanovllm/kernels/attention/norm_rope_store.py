"""A kernel between the qkv projection and attention: q and k norms, rotary embedding, and cache store."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import CacheLayout
from nanovllm.kernels.e4m3 import bfloat16_bits, encode_rows
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch

PER_PROGRAM = tl.constexpr(16)  # heads per program


class Rows(NamedTuple):
    """The sizes of the rows of qkv, as a compile-time constant. Each head of a token is a row."""

    heads: int  # query heads
    rotary: int  # the first `rotary` elements of each head are rotated


@triton.jit
def norm_rope(x, x_swapped, cos, sin, eps, HAS_NORM: tl.constexpr):
    """Rotate each row of x [R, D]. If HAS_NORM is set, normalize the row first. Compute in float32, and round once.

    `x_swapped` is x with its halves swapped. `cos` and `sin` [1 or R, D] come from FusedRotaryEmbedding, which negates
    the first half of `sin`. If HAS_NORM is set, the caller has multiplied `cos` by the norm's weight, and `sin` by the
    norm's weight with swapped halves. The inverse root mean square of a row is applied after the rotation.
    """
    y = x.to(tl.float32)
    rotated = y * cos + x_swapped.to(tl.float32) * sin
    if HAS_NORM:
        inverse_rms = tl.rsqrt(tl.sum(y * y, 1) / x.shape[1] + eps)
        rotated = rotated * inverse_rms[:, None]
    return rotated.to(x.dtype)


@triton.jit
def load_cos_sin(cos_sin_ptr, token, d, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Return a token's cosines and sines for elements `d` of a head, and the indices of their rotation partners."""
    cos_ptr = cos_sin_ptr + token * (2 * ROTARY)
    if ROTARY == HEAD_DIM:
        return tl.load(cos_ptr + d), tl.load(cos_ptr + ROTARY + d), (d + ROTARY // 2) % ROTARY
    is_rotated = d < ROTARY
    swapped = tl.where(is_rotated, (d + ROTARY // 2) % ROTARY, d)
    return tl.load(cos_ptr + d, is_rotated, 1.0), tl.load(cos_ptr + ROTARY + d, is_rotated, 0.0), swapped


# the inputs of norm and rope are complete before the qkv projection starts (see dependent_launch.py)
@dependent_kernel(early=("norm_rope_ptrs",))
@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr, norm_rope_ptrs, q_ptr, cache_ptrs, qkv_stride, ROWS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr
):
    """Each program processes PER_PROGRAM heads of one token.

    In qkv, a token's query heads are followed by key heads, then by value heads. All heads run the same instructions,
    with the masks `is_q`, `is_k` and `is_v`.
    """
    gdc_launch_dependents(PDL)
    q_weight_ptr, k_weight_ptr, eps, cos_sin_ptr, slot_mapping_ptr = norm_rope_ptrs
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    HEADS: tl.constexpr = ROWS.heads
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    KV_HEADS: tl.constexpr = CACHE.kv_heads
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    d = tl.arange(0, HEAD_DIM)[None, :]
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    # a column, because Triton's interpreter can't combine a column with a scalar
    has_slot = slot + 0 * row >= 0
    is_q = row < HEADS
    is_k = has_slot & (row >= HEADS) & (row < HEADS + KV_HEADS)
    is_v = has_slot & (row >= HEADS + KV_HEADS) & (row < HEADS + 2 * KV_HEADS)
    cos, sin, d_swapped = load_cos_sin(cos_sin_ptr, token, d, HEAD_DIM, ROWS.rotary)
    if q_weight_ptr is not None:
        cos = cos * tl.where(is_q, tl.load(q_weight_ptr + d), tl.load(k_weight_ptr + d))
        sin = sin * tl.where(is_q, tl.load(q_weight_ptr + d_swapped), tl.load(k_weight_ptr + d_swapped))
    gdc_wait(PDL)
    x_ptr = qkv_ptr + token * qkv_stride + row * HEAD_DIM
    x = tl.load(x_ptr + d, is_q | is_k | is_v, 0.0)
    x_swapped = tl.load(x_ptr + d_swapped, is_q | is_k, 0.0)
    y = norm_rope(x, x_swapped, cos, sin, eps, q_weight_ptr is not None)
    tl.store(q_ptr + (token * HEADS + row) * HEAD_DIM + d, y, is_q)
    k, v = y, x
    if scales_ptr is not None:
        k, scales = encode_rows(tl.where(is_v, x, y), k_cache_ptr.dtype.element_ty)
        v = k
        kv_head = row - HEADS - tl.where(is_v, KV_HEADS, 0)
        pair = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        scale_ptr = scales_ptr.to(tl.pointer_type(tl.int16)) + 2 * pair + tl.where(is_v, 1, 0)
        tl.store(scale_ptr, bfloat16_bits(scales)[:, None], is_k | is_v)
    tl.store(k_cache_ptr + (slot * KV_HEADS + row - HEADS) * HEAD_DIM + d, k, is_k)
    tl.store(v_cache_ptr + (slot * KV_HEADS + row - HEADS - KV_HEADS) * HEAD_DIM + d, v, is_v)


def norm_rope_and_store(qkv: torch.Tensor, qk_norm_rope, slot_mapping: torch.Tensor, cache) -> torch.Tensor:
    """Normalize and rotate the queries and keys in qkv. Store the keys and values in the cache.

    Return the queries [T, heads, head_dim]. `qkv` is [T, heads + 2 * kv_heads, head_dim], with any stride between
    tokens. `head_dim` is a power of two.

    qk_norm_rope: the tuple (q weight, k weight, eps, cos_sin). The weights are [head_dim], or `None` if there is no
        norm. `cos_sin` [T, 2, N] float32 comes from FusedRotaryEmbedding. `cos_sin` defines the rotation of each head's
        first N elements.
    slot_mapping: [T], each token's index in the cache (whose first two dimensions are flattened), or -1 to store
        nothing
    """
    num_tokens, num_rows, head_dim = qkv.shape
    layout = CacheLayout(*cache.k.shape[1:])
    heads = num_rows - 2 * layout.kv_heads
    q = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        inputs, caches = (*qk_norm_rope, slot_mapping), (cache.k, cache.v, cache.scales)
        rows, grid = Rows(heads, inputs[3].shape[2]), (num_tokens, -(-num_rows // PER_PROGRAM.value))
        constants = dict(ROWS=rows, CACHE=layout, num_warps=4 if num_tokens < 1024 else 1)
        launch(_norm_rope_store_kernel, grid, qkv.device)(qkv, inputs, q, caches, qkv.stride(0), **constants)
    return q

"""Computes prefill attention in which no bit of a result depends on other sequences or on the chunks of prompts."""

import torch
import triton
import triton.language as tl

from nanovllm.invariant.kernels.invariant_attention import (
    SEGMENT,
    add_segment,
    add_tile,
    segment_of,
    store_attended,
    tile_sizes,
)
from nanovllm.kernels.attention.paged_cache import cache_tiles, layout_of, log2_scale
from nanovllm.kernels.attention.split_sequence import NO_KEYS
from nanovllm.kernels.e4m3 import ONES, as_fp8_partner, decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch


@triton.jit
def _add_tiles(
    sums, q, begin, end, position, keys, scale, length, CACHE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr
):
    """Add the keys from `begin` to `end` to the sums of a segment."""
    k_tiles, v_tiles, scales_ptr, table_ptr, kv_head = keys
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    n = tl.arange(0, CACHE.tile)
    for tile in tl.range(begin, end, CACHE.tile, num_stages=STAGES):
        block = tl.load(table_ptr + tile // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + tile % BLOCK_SIZE
        k = k_tiles.load([slot, kv_head * HEAD_DIM])
        v = v_tiles.load([slot, kv_head * HEAD_DIM])
        stored_dtype: tl.constexpr = k.dtype
        pairs, visible = None, None
        if scales_ptr is not None:
            scale_at = (block.to(tl.int64) * CACHE.kv_heads + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE + n
            pairs = tl.load(scales_ptr + scale_at)  # no mask, so that the load is vectorized
            if MASKED:
                pairs = tl.where(tile + n < length, pairs, ONES)
            k, v = decode_e4m3(k, q.dtype), decode_e4m3(v, q.dtype)
        if MASKED:
            visible = (tile + n)[None, :] <= position[:, None]
            if CACHE.window:
                visible &= (tile + n)[None, :] > position[:, None] - CACHE.window
            v = tl.where((tile + n < length)[:, None], v, 0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        sums = add_tile(sums, scores, v, scale, pairs, visible, stored_dtype, 1, CACHE.soft_cap)
    return sums


@dependent_kernel(early=("query_ptrs",))
@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    k_tiles,
    v_tiles,
    scales_ptr,
    query_ptrs,
    block_tables_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    table_stride,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The program (kv_head, i) computes the i-th query tile, segment by segment."""
    gdc_launch_dependents(PDL)
    query_tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr = query_ptrs
    HEADS: tl.constexpr = CACHE.kv_heads * GROUP
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TOKENS: tl.constexpr = TILE_M // GROUP  # a tile has TOKENS tokens with all query heads of one kv head
    if not PDL:  # without TMA, make descriptors here, where strides are constants, so that loads stay wide
        ROW: tl.constexpr = CACHE.kv_heads * HEAD_DIM
        k_tiles = tl.make_tensor_descriptor(k_tiles, [2147483647, ROW], [ROW, 1], [CACHE.tile, HEAD_DIM])
        v_tiles = tl.make_tensor_descriptor(v_tiles, [2147483647, ROW], [ROW, 1], [CACHE.tile, HEAD_DIM])
    kv_head = tl.program_id(0)
    seq = tl.load(query_tiles_ptr + 2 * tl.program_id(1))
    first = tl.load(query_tiles_ptr + 2 * tl.program_id(1) + 1)
    if seq < 0:
        return
    first_row = tl.load(cu_seqlens_q_ptr + seq)
    num_new = tl.load(cu_seqlens_q_ptr + seq + 1) - first_row
    length = tl.load(context_lens_ptr + seq)
    num_cached = length - num_new  # tokens computed in earlier steps
    begin, end = 0, tl.minimum(num_cached + first + TOKENS, length)
    unmasked_begin, unmasked_end = 0, (num_cached + first + 1) // CACHE.tile * CACHE.tile
    if CACHE.window:
        begin = tl.maximum(num_cached + first + 1 - CACHE.window, 0) // CACHE.tile * CACHE.tile
        unmasked_begin = tl.cdiv(tl.maximum(num_cached + first + TOKENS - CACHE.window, 0), CACHE.tile) * CACHE.tile
    m = tl.arange(0, TILE_M)
    d = tl.arange(0, HEAD_DIM)
    token = first + m // GROUP
    valid = ((m < TOKENS * GROUP) & (token < num_new))[:, None]
    position = num_cached + token
    row = (first_row + token).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    at = row[:, None] * HEAD_DIM + d[None, :]
    gdc_wait(PDL)
    q = tl.load(q_ptr + at, valid, 0.0)
    if scales_ptr is not None:
        q = as_fp8_partner(q)
    keys = k_tiles, v_tiles, scales_ptr, block_tables_ptr + seq.to(tl.int64) * table_stride, kv_head
    acc, no_keys = tl.zeros([TILE_M, HEAD_DIM], tl.float32), tl.full([TILE_M, 1], NO_KEYS, tl.float32)
    done = acc, tl.zeros([TILE_M, 1], tl.float32), no_keys
    for segment in range(begin // SEGMENT, tl.cdiv(end, SEGMENT)):
        first_key = tl.maximum(segment * SEGMENT, begin)
        end_key = tl.minimum((segment + 1) * SEGMENT, end)
        middle = tl.minimum(tl.maximum(unmasked_begin, first_key), end_key)
        last = tl.minimum(tl.maximum(unmasked_end, middle), end_key)
        sums = acc, tl.zeros([TILE_M, 16], tl.float32), no_keys
        # keys that the window hides from some queries, keys that all queries see, keys that causality hides from some
        if CACHE.window:
            sums = _add_tiles(sums, q, first_key, middle, position, keys, scale, length, CACHE, STAGES, True)
            first_key = middle
        sums = _add_tiles(sums, q, first_key, last, position, keys, scale, length, CACHE, STAGES, False)
        sums = _add_tiles(sums, q, last, end_key, position, keys, scale, length, CACHE, STAGES, True)
        done = add_segment(done, segment_of(sums, 1))
    store_attended(out_ptr, at, done, valid, sinks_ptr, (kv_head * GROUP + m % GROUP)[:, None])


def query_tile_size(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many tokens a query tile covers, if each key-value head has `group` query heads."""
    return tile_sizes(head_dim, dtype)[0] // group


def prefill_attention(
    q: torch.Tensor,
    cache,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_tiles: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `prefill_attention` as defined in prefill_attention.py."""
    heads, head_dim = q.shape[1:]
    tile_m, tile_n = tile_sizes(head_dim, q.dtype)
    layout = layout_of(cache, tile_n)
    out = torch.empty_like(q) if out is None else out
    queries, tiles = (query_tiles, cu_seqlens_q, context_lens), cache_tiles(cache, layout)
    scale = log2_scale(cache)
    constants = dict(GROUP=heads // layout.kv_heads, TILE_M=tile_m, CACHE=layout, num_warps=8)
    constants["STAGES"] = 5 if head_dim <= 128 else 4
    pointers = q, *tiles, cache.scales, queries, block_tables, cache.spec.sinks, out
    launch(_prefill_kernel, (layout.kv_heads, len(query_tiles)), q.device)(
        *pointers, scale, block_tables.stride(0), **constants
    )
    return out

"""Causal attention of new tokens over the paged keys of their sequences (FlashAttention-2, arXiv:2307.08691)."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import (
    LOG2_E,
    add_sinks,
    cache_tiles,
    layout_of,
    log2_scale,
    tanh_of_scores,
)
from nanovllm.kernels.e4m3 import ONES, as_fp8_partner, decode_e4m3, unpack_scales
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels


@triton.jit
def _attend_tiles(
    state, q, begin, end, position, keys, kv_head, scale, length, CACHE: tl.constexpr, MASKED: tl.constexpr
):
    """Add the keys from `begin` to `end` to the running sums and maxima in `state`, and return the new state."""
    acc, l_i, m_i = state
    k_tiles, v_tiles, scales_ptr, table_ptr = keys
    IS_FP8: tl.constexpr = scales_ptr is not None
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    factor = scale
    if CACHE.soft_cap != 0.0:
        factor = CACHE.soft_cap * LOG2_E
    n = tl.arange(0, CACHE.tile)
    for tile in tl.range(begin, end, CACHE.tile, num_stages=2):
        block = tl.load(table_ptr + tile // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + tile % BLOCK_SIZE
        k = k_tiles.load([slot, kv_head * HEAD_DIM])
        if IS_FP8:
            stored_dtype: tl.constexpr = k.dtype
            k = decode_e4m3(k, q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = v_tiles.load([slot, kv_head * HEAD_DIM])
        if IS_FP8:
            v = decode_e4m3(v, q.dtype)
            scale_at = (block.to(tl.int64) * CACHE.kv_heads + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE + n
            pairs = tl.load(scales_ptr + scale_at)  # no mask, so that the load is vectorized
            if MASKED:
                pairs = tl.where(tile + n < length, pairs, ONES)
            k_scale, v_log2_scale = unpack_scales(pairs, stored_dtype)
            if CACHE.soft_cap != 0.0:
                scores = tanh_of_scores(scores * k_scale[None, :], scale, CACHE.soft_cap) * factor
                scores = scores + v_log2_scale[None, :]
            else:
                scores = scores * (k_scale * scale)[None, :] + v_log2_scale[None, :]
        elif CACHE.soft_cap != 0.0:
            scores = tanh_of_scores(scores, scale, CACHE.soft_cap)
        if MASKED:
            visible = (tile + n)[None, :] <= position[:, None]
            if CACHE.window:
                visible &= (tile + n)[None, :] > position[:, None] - CACHE.window
            scores = tl.where(visible, scores, -1e30)
            v = tl.where((tile + n < length)[:, None], v, 0.0)
        if IS_FP8:
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
        else:
            m_new = tl.maximum(m_i, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - m_new[:, None])
        if MASKED and CACHE.window:  # until a row has seen a key, hidden keys would get the weight 1
            p = tl.where(visible, p, 0.0)
        alpha = tl.exp2(m_i - m_new)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        if IS_FP8:
            p = p * tl.exp2(-v_log2_scale)[None, :]
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
    return acc, l_i, m_i


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
    PDL: tl.constexpr,
):
    # Program (i, kv_head, part) computes TILE_M rows of the i-th tile of queries. Each row is one query head of one
    # token.
    gdc_launch_dependents(PDL)
    query_tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr = query_ptrs
    KV_HEADS: tl.constexpr = CACHE.kv_heads
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TILE_N: tl.constexpr = CACHE.tile
    WINDOW: tl.constexpr = CACHE.window
    if not PDL:  # without TMA, make descriptors here, where strides are constants, so that loads stay wide
        ROW: tl.constexpr = KV_HEADS * HEAD_DIM
        k_tiles = tl.make_tensor_descriptor(k_tiles, [2147483647, ROW], [ROW, 1], [TILE_N, HEAD_DIM])
        v_tiles = tl.make_tensor_descriptor(v_tiles, [2147483647, ROW], [ROW, 1], [TILE_N, HEAD_DIM])
    TOKENS: tl.constexpr = TILE_M // GROUP  # a tile has TOKENS tokens with all query heads of one kv head
    seq = tl.load(query_tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(query_tiles_ptr + 2 * tl.program_id(0) + 1) + tl.program_id(2) * TOKENS
    kv_head = tl.program_id(1)
    if seq < 0:
        return
    first_row = tl.load(cu_seqlens_q_ptr + seq)
    num_new = tl.load(cu_seqlens_q_ptr + seq + 1) - first_row
    if first >= num_new:
        return
    length = tl.load(context_lens_ptr + seq)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    gdc_wait(PDL)

    m = tl.arange(0, TILE_M)
    d = tl.arange(0, HEAD_DIM)
    token = first + m // GROUP
    valid = ((m < TOKENS * GROUP) & (token < num_new))[:, None]
    row = (first_row + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    at = row[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + at, valid, 0.0)
    if scales_ptr is not None:
        q = as_fp8_partner(q)
    num_cached = length - num_new  # tokens computed in earlier steps
    position = num_cached + token

    m_i = tl.full([TILE_M], -1e30, tl.float32)
    l_i = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    begin, unmasked_begin = 0, 0
    unmasked_end = (num_cached + first + 1) // TILE_N * TILE_N
    if WINDOW:
        begin = tl.maximum(num_cached + first + 1 - WINDOW, 0) // TILE_N * TILE_N
        unmasked_begin = tl.cdiv(tl.maximum(num_cached + first + TOKENS - WINDOW, 0), TILE_N) * TILE_N
        unmasked_end = tl.maximum(unmasked_end, begin)
        unmasked_begin = tl.minimum(unmasked_begin, unmasked_end)
    bounds = begin, unmasked_begin, unmasked_end, tl.minimum(num_cached + first + TOKENS, length)
    state, keys = (acc, l_i, m_i), (k_tiles, v_tiles, scales_ptr, table_ptr)
    # keys that the window hides from some rows, keys that all rows see, keys that causality hides from some rows
    for part in tl.static_range(0 if WINDOW else 1, 3):
        state = _attend_tiles(
            state, q, bounds[part], bounds[part + 1], position, keys, kv_head, scale, length, CACHE, part != 1
        )
    acc, l_i, m_i = state
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + kv_head * GROUP + m % GROUP).to(tl.float32) * LOG2_E
        acc, _, l_i = add_sinks(acc, m_i, l_i, sinks)
    tl.store(out_ptr + at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), valid)


def _tile_sizes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (query rows, keys) per tile."""
    if head_dim > 256:
        return 32, 32
    return (64, 32) if dtype == torch.float32 or head_dim > 128 else (128, 64)


def _is_for_hopper(head_dim: int, dtype: torch.dtype) -> bool:
    return head_dim in (64, 128, 256) and dtype != torch.float32 and has_hopper_kernels()


def query_tile_size(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many tokens a query tile covers, if each key-value head has `group` query heads.

    On Hopper, the kernel of hopper_prefill.py may replace the kernel of this file. Hopper tiles have 128 rows. On
    Hopper, this function therefore returns the largest multiple of this file's tile size that fits into 128 rows.
    """
    tokens = _tile_sizes(head_dim, dtype)[0] // group
    if _is_for_hopper(head_dim, dtype):
        return 128 // (group & -group) // tokens * tokens
    return tokens


def prefill_attention(
    q: torch.Tensor,
    cache,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_tiles: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of new tokens to the cached keys of their sequences, in the shape of q.

    A query sees the tokens of its sequence up to the query's position. If the layer has a window, a query sees only the
    last `window` tokens up to its position. The cache already contains all `context_lens[b]` tokens of sequence b,
    including the tokens of this step.

    q: a contiguous tensor [T, heads, head_dim], the queries for the last tokens of B sequences. At most 64 query heads
        share a key-value head.
    cu_seqlens_q: [B + 1], the indices at which the queries of each sequence begin.
    cache, context_lens, block_tables: as in `decode_attention`.
    query_tiles: an int32 tensor [N, 2] of pairs (sequence, index of the tile's first query within the sequence's
        queries). Programs start in the order of the pairs. A tile covers at most `query_tile_size` queries. Pairs with
        sequence -1 are skipped.
    out: receives the result. Rows that no tile covers stay unchanged.
    """
    heads, head_dim = q.shape[1:]
    tile_m, tile_n = _tile_sizes(head_dim, q.dtype)
    layout = layout_of(cache, tile_n)
    out = torch.empty_like(q) if out is None else out
    queries, group = (query_tiles, cu_seqlens_q, context_lens), heads // layout.kv_heads
    tokens = query_tile_size(group, head_dim, q.dtype)
    tile = layout_of(cache, 64 if head_dim > 128 else 128).tile
    spec = cache.spec
    is_plain = cache.scales is None and not spec.is_special
    if is_plain and tile >= 64 and q.is_cuda and _is_for_hopper(head_dim, q.dtype):
        from nanovllm.kernels.hopper.hopper_prefill import attend  # it needs Gluon of Triton 3.6

        attend(tokens, tile, q, cache, (*queries, block_tables), out)
        return out
    tiles, scale = cache_tiles(cache, layout), log2_scale(cache)
    constants = dict(GROUP=group, TILE_M=tile_m, CACHE=layout, num_warps=4)
    launch(_prefill_kernel, (len(query_tiles), layout.kv_heads, tokens // (tile_m // group)), q.device)(
        q, *tiles, cache.scales, queries, block_tables, spec.sinks, out, scale, block_tables.stride(0), **constants
    )
    return out

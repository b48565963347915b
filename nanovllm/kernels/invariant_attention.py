"""Attention whose results depend in no bit on the batch, on chunks, or on how keys are split over programs.

One kernel computes decodes and chunks of prompts, so both have the same instructions for each query. Keys are added up
in tiles, and tiles in segments, which begin at absolute positions. Each segment has sums of its own, which are added up
in order: a query's segments may be computed by one program, or by several (flash-decoding).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    has_tma,
    launch,
)
from nanovllm.kernels.fp8 import ONES, as_fp8_partner, decode_e4m3, unpack_scales
from nanovllm.kernels.paged_cache import CacheLayout, layout_of
from nanovllm.kernels.split_sequence import NO_KEYS, choose_num_splits

# keys, a multiple of every tile: the fewer, the more programs a sequence has, and the more often each begins anew
SEGMENT = tl.constexpr(1024)


@triton.jit
def _fma(x, factor, y):
    """x * factor + y, rounded once. Whether a compiler fuses a multiplication and an addition is otherwise up to it."""
    return tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(y, x.shape))


@triton.jit
def _add_tiles(
    sums, q, begin, end, position, keys, scale, length, CACHE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr
):
    """Add the keys from begin to end to the sums of weighted values and of weights, relative to the largest score."""
    acc, total, largest = sums
    k_tiles, v_tiles, scales_ptr, table_ptr, kv_head = keys
    IS_FP8: tl.constexpr = scales_ptr is not None
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    n = tl.arange(0, CACHE.tile)
    for tile in tl.range(begin, end, CACHE.tile, num_stages=STAGES):
        block = tl.load(table_ptr + tile // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + tile % BLOCK_SIZE
        k = k_tiles.load([slot, kv_head * HEAD_DIM])
        v = v_tiles.load([slot, kv_head * HEAD_DIM])
        if IS_FP8:
            scale_at = (block.to(tl.int64) * CACHE.kv_heads + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE + n
            pairs = tl.load(scales_ptr + scale_at)  # without a mask, so that several are loaded at once
            if MASKED:
                pairs = tl.where(tile + n < length, pairs, ONES)
            k_scale, v_log2_scale = unpack_scales(pairs, k.dtype)
            k, v = decode_e4m3(k, q.dtype), decode_e4m3(v, q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee")
        factor = scale
        if IS_FP8:
            scores, factor = _fma(scores, (k_scale * scale)[None, :], v_log2_scale[None, :]), 1.0
        seen = scores
        if MASKED:
            visible = (tile + n)[None, :] <= position[:, None]
            if CACHE.window:
                visible &= (tile + n)[None, :] > position[:, None] - CACHE.window
            seen = tl.where(visible, scores, NO_KEYS)
            v = tl.where((tile + n < length)[:, None], v, 0.0)
        new_largest = tl.maximum(largest, tl.max(seen, 1) * factor)
        weights = tl.exp2(_fma(scores, factor, -new_largest[:, None]))
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        shrinks = tl.exp2(largest - new_largest)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrinks[:, None], input_precision="ieee")
        if IS_FP8:
            weights = weights * tl.exp2(-v_log2_scale)[None, :]
        total = _fma(total, shrinks, tl.sum(weights, 1))
        largest = new_largest
    return acc, total, largest


@triton.jit
def _add_segment(sums, acc, total, largest):
    """Add the sums of a segment to those of the segments before."""
    acc_before, total_before, largest_before = sums
    new_largest = tl.maximum(largest_before, largest)
    shrinks, factor = tl.exp2(largest_before - new_largest), tl.exp2(largest - new_largest)
    acc = _fma(acc, factor[:, None], acc_before * shrinks[:, None])
    return acc, _fma(total, factor, total_before * shrinks), new_largest


@dependent_kernel(early=("query_ptrs",))
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _attention_kernel(
    q_ptr,
    k_tiles,
    v_tiles,
    scales_ptr,
    query_ptrs,
    block_tables_ptr,
    out_ptrs,
    scale,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has a tile of queries with all heads of a key-value head: of a chunk, or a single one that decodes."""
    if PDL:
        gdc_launch_dependents()
    query_tiles_ptr, cu_seqlens_q_ptr, num_seqs_ptr, context_lens_ptr = query_ptrs
    out_ptr, acc_ptr, sums_ptr = out_ptrs
    HEADS: tl.constexpr = CACHE.kv_heads * GROUP
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    if not PDL:  # pointers: the descriptors are made here, where the strides are constants, so that loads stay wide
        ROW: tl.constexpr = CACHE.kv_heads * HEAD_DIM
        k_tiles = tl.make_tensor_descriptor(k_tiles, [2147483647, ROW], [ROW, 1], [CACHE.tile, HEAD_DIM])
        v_tiles = tl.make_tensor_descriptor(v_tiles, [2147483647, ROW], [ROW, 1], [CACHE.tile, HEAD_DIM])
    kv_head, split = tl.program_id(0), tl.program_id(2)
    TOKENS: tl.constexpr = 1 if query_tiles_ptr is None else TILE_M // GROUP
    if query_tiles_ptr is None:
        seq, first, num_new = tl.program_id(1), 0, 1
        first_row = seq
        if num_seqs_ptr is not None:
            num_seqs = tl.load(num_seqs_ptr)
            if seq >= num_seqs:
                return
    else:
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
    first_segment, end_segment = begin // SEGMENT, tl.cdiv(end, SEGMENT)
    per_split = tl.maximum(tl.cdiv(end_segment - first_segment, splits), 1)
    own_segment = first_segment + split * per_split
    end_own = tl.minimum(own_segment + per_split, end_segment)
    if (own_segment >= end_own) & (split > 0):
        return

    m = tl.arange(0, TILE_M)
    d = tl.arange(0, HEAD_DIM)
    token = first + m // GROUP
    valid = (m < TOKENS * GROUP) & (token < num_new)
    position = num_cached + token
    row = (first_row + token).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    at = row[:, None] * HEAD_DIM + d[None, :]
    if PDL:
        gdc_wait()
    q = tl.load(q_ptr + at, valid[:, None], 0.0)
    if scales_ptr is not None:
        q = as_fp8_partner(q)
    keys = k_tiles, v_tiles, scales_ptr, block_tables_ptr + seq.to(tl.int64) * table_stride, kv_head
    zeros, no_keys = tl.zeros([TILE_M, HEAD_DIM], tl.float32), tl.full([TILE_M], NO_KEYS, tl.float32)
    acc, total, largest = zeros, tl.zeros([TILE_M], tl.float32), no_keys
    for segment in range(own_segment, end_own):
        first_key = tl.maximum(segment * SEGMENT, begin)
        end_key = tl.minimum((segment + 1) * SEGMENT, end)
        middle = tl.minimum(tl.maximum(unmasked_begin, first_key), end_key)
        last = tl.minimum(tl.maximum(unmasked_end, middle), end_key)
        sums = zeros, tl.zeros([TILE_M], tl.float32), no_keys
        if CACHE.window:  # what the window cuts, what all queries see, what causality cuts
            sums = _add_tiles(sums, q, first_key, middle, position, keys, scale, length, CACHE, STAGES, True)
            first_key = middle
        sums = _add_tiles(sums, q, first_key, last, position, keys, scale, length, CACHE, STAGES, False)
        sums = _add_tiles(sums, q, last, end_key, position, keys, scale, length, CACHE, STAGES, True)
        if acc_ptr is None:
            acc, total, largest = _add_segment((acc, total, largest), *sums)
        else:
            part = (segment - first_segment) * (tl.num_programs(1) * HEADS) + row
            tl.store(acc_ptr + part[:, None] * HEAD_DIM + d[None, :], sums[0], valid[:, None])
            tl.store(sums_ptr + 2 * part, sums[1], valid)
            tl.store(sums_ptr + 2 * part + 1, sums[2], valid)
    if acc_ptr is None:
        out = (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, valid[:, None])


@dependent_kernel(early=("query_ptrs",))
@triton.jit
def _add_segments_kernel(query_ptrs, out_ptrs, num_rows, HEADS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr):
    """The result of one query and head from its segments' sums; it adds them up as a single program does."""
    if PDL:
        gdc_launch_dependents()
    num_seqs_ptr, context_lens_ptr = query_ptrs
    out_ptr, acc_ptr, sums_ptr = out_ptrs
    row = tl.program_id(0).to(tl.int64)
    if num_seqs_ptr is not None:
        num_seqs = tl.load(num_seqs_ptr)
        if row >= num_seqs * HEADS:
            return
    length = tl.load(context_lens_ptr + row // HEADS)
    begin = 0
    if CACHE.window:
        begin = tl.maximum(length - CACHE.window, 0) // CACHE.tile * CACHE.tile
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    d = tl.arange(0, HEAD_DIM)[None, :]
    one = tl.arange(0, 1)
    sums = tl.zeros([1, HEAD_DIM], tl.float32), tl.zeros([1], tl.float32), tl.full([1], NO_KEYS, tl.float32)
    if PDL:
        gdc_wait()
    for i in range(tl.cdiv(length, SEGMENT) - begin // SEGMENT):
        part = i * num_rows + row
        acc = tl.load(acc_ptr + part * HEAD_DIM + d)
        sums = _add_segment(sums, acc, tl.load(sums_ptr + 2 * part + one), tl.load(sums_ptr + 2 * part + 1 + one))
    out = (sums[0] / tl.maximum(sums[1], 1e-30)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + d, out)


class Tiles(NamedTuple):
    """How the work is divided. Rows of scores lie in threads in the same way, whatever the number of rows."""

    rows: int  # of queries and heads
    keys: int
    warps: int
    stages: int  # of loads: of a block's id, and of tiles of keys


def _tiles(head_dim: int, dtype: torch.dtype, is_decode: bool) -> Tiles:
    if dtype == torch.float32 or head_dim > 128:
        return Tiles(64, 32, 8, 4)
    return Tiles(64, 64, 4, 4) if is_decode else Tiles(128, 64, 8, 4)


def query_tile_size(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """The number of tokens of a chunk's tile, where `group` query heads share a key-value head."""
    return _tiles(head_dim, dtype, is_decode=False).rows // group


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    num_seqs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """What decode_attention.py has under this name, with the same arguments."""
    out = torch.empty_like(q) if out is None else out
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    num_segments = triton.cdiv(max_context_len, SEGMENT.value)
    if splits is None:
        splits = choose_num_splits(len(q) * kv_heads, max_context_len, SEGMENT.value, q.device)
    partial = None, None
    if splits > 1:
        shape = num_segments, len(q), heads
        partial = tuple(torch.empty((*shape, n), dtype=torch.float32, device=q.device) for n in (q.shape[2], 2))
    queries, caches = (None, None, num_seqs, context_lens), (k_cache, v_cache, scales)
    layout = _attend(q, caches, queries, block_tables, (out, *partial), splits, window)
    if splits > 1:
        launch(_add_segments_kernel, (len(q) * heads,), q.device, shared=50)(
            queries[2:], (out, *partial), len(q) * heads, HEADS=heads, CACHE=layout, num_warps=1
        )
    return out


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_tiles: torch.Tensor,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What prefill_attention.py has under this name, with the same arguments."""
    out = torch.empty_like(q) if out is None else out
    queries, caches = (query_tiles, cu_seqlens_q, None, context_lens), (k_cache, v_cache, scales)
    _attend(q, caches, queries, block_tables, (out, None, None), 1, window)
    return out


def _attend(q, caches, queries, block_tables, outputs, splits: int, window: int | None) -> CacheLayout:
    (num_rows, heads, head_dim), query_tiles = q.shape, queries[0]
    tiles = _tiles(head_dim, q.dtype, is_decode=query_tiles is None)
    layout = layout_of(caches[0], tiles.keys, window)
    if has_tma(q.device):  # a tile is loaded by one instruction
        shape = [layout.tile, head_dim]
        k_tiles, v_tiles = (TensorDescriptor.from_tensor(x.flatten(0, 1).flatten(1), shape) for x in caches[:2])
        caches = k_tiles, v_tiles, caches[2]
    scale = head_dim**-0.5 * 1.4426950408889634  # log2(e): the kernel computes powers of two
    grid = layout.kv_heads, num_rows if query_tiles is None else len(query_tiles), splits
    constants = dict(
        GROUP=heads // layout.kv_heads, TILE_M=tiles.rows, CACHE=layout, STAGES=tiles.stages, num_warps=tiles.warps
    )
    launch(_attention_kernel, grid, q.device)(
        q, *caches, queries, block_tables, outputs, scale, block_tables.stride(0), splits, **constants
    )
    return layout

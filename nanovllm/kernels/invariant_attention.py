"""Attention whose results depend in no bit on the batch, on chunks, or on how keys are split over programs.

The kernels of decodes and of chunks have the same arithmetic for each query (`_add_tile`). Keys are added up in tiles,
and tiles in segments, which begin at absolute positions. Each segment has sums of its own, which are added up in order:
so a query's segments may be computed by one program, or by several (flash-decoding).

That products are the same in tiles of any number of rows, transposed or not, is a property of Hopper's instructions for
64 rows (wgmma; mma.sync rounds otherwise). tests/test_invariant.py checks it.
"""

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
    next_power_of_2,
    prefetch_rows,
)
from nanovllm.kernels.fp8 import ONES, as_fp8_partner, decode_e4m3, unpack_scales
from nanovllm.kernels.paged_cache import layout_of
from nanovllm.kernels.split_sequence import NO_KEYS, choose_num_splits

# keys, a multiple of every tile: the fewer, the more programs a sequence has, and the more often sums are added up
SEGMENT = tl.constexpr(512)
NUM_IDS = tl.constexpr(16)  # block ids that are loaded at a time


@triton.jit
def _fma(x, factor, y):
    """x * factor + y, rounded once. Whether a compiler fuses a multiplication and an addition is otherwise up to it."""
    return tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(y, x.shape))


@triton.jit
def _add_tile(sums, scores, v, scale, pairs, visible, stored_dtype: tl.constexpr, KEYS: tl.constexpr):
    """Add a tile of keys to the sums: of weighted values and of weights, relative to the largest score.

    Scores are products of queries and keys, whose dimension is KEYS: 1, or 0 where all is transposed. `visible` is None
    if all keys are; else values of others are zeros. In FP8 `pairs` are the scales of keys and values. A product with
    ones adds up the weights, in an order that does not depend on which threads have them.
    """
    acc, total, largest = sums
    # over small scales of values, weights may exceed the range of float16
    DTYPE: tl.constexpr = tl.bfloat16 if pairs is not None and v.dtype == tl.float16 else v.dtype
    factor = tl.full([1, 1], 1.0, tl.float32)
    if pairs is None:
        factor = factor * scale
    else:
        k_scale, v_log2_scale = unpack_scales(pairs, stored_dtype)
        k_scale, v_log2_scale = tl.expand_dims(k_scale * scale, 1 - KEYS), tl.expand_dims(v_log2_scale, 1 - KEYS)
        scores = _fma(scores, k_scale, v_log2_scale)
    seen = scores
    if visible is not None:
        seen = tl.where(visible, scores, NO_KEYS)
    new_largest = tl.maximum(largest, tl.max(seen, KEYS, keep_dims=True) * factor)
    weights = tl.exp2(_fma(scores, factor, -new_largest))
    if visible is not None:
        weights = tl.where(visible, weights, 0.0)
    shrinks = tl.exp2(largest - new_largest)
    p = weights.to(v.dtype)
    if pairs is not None:
        weights = weights * tl.exp2(-v_log2_scale)
    if KEYS == 1:
        acc = tl.dot(p, v, acc * shrinks, input_precision="ieee")
        ones = tl.full([v.shape[0], 16], 1.0, DTYPE)
        total = tl.dot(weights.to(DTYPE), ones, total * shrinks, input_precision="ieee")
    else:
        acc = tl.dot(v.T, p, acc * shrinks, input_precision="ieee")
        ones = tl.full([64, v.shape[0]], 1.0, DTYPE)
        total = tl.dot(ones, weights.to(DTYPE), total * shrinks, input_precision="ieee")
    return acc, total, new_largest


@triton.jit
def _segment_of(sums, KEYS: tl.constexpr):
    """The sums after the last tile, of which those of weights are all the same."""
    acc, total, largest = sums
    return acc, tl.max(total, KEYS, keep_dims=True), largest


@triton.jit
def _add_segment(done, segment):
    """The sums of some segments and of the next one."""
    acc_before, total_before, largest_before = done
    acc, total, largest = segment
    new_largest = tl.maximum(largest_before, largest)
    shrinks, factor = tl.exp2(largest_before - new_largest), tl.exp2(largest - new_largest)
    return _fma(acc, factor, acc_before * shrinks), _fma(total, factor, total_before * shrinks), new_largest


@triton.jit
def _store_attended(out_ptr, at, done, mask):
    acc, total, _ = done
    tl.store(out_ptr + at, (acc / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty), mask)


# -- chunks ------------------------------------------------------------------------------------------------------------


@triton.jit
def _add_tiles(
    sums, q, begin, end, position, keys, scale, length, CACHE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr
):
    """Add the keys from begin to end to a segment's sums."""
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
            pairs = tl.load(scales_ptr + scale_at)  # without a mask, so that several are loaded at once
            if MASKED:
                pairs = tl.where(tile + n < length, pairs, ONES)
            k, v = decode_e4m3(k, q.dtype), decode_e4m3(v, q.dtype)
        if MASKED:
            visible = (tile + n)[None, :] <= position[:, None]
            if CACHE.window:
                visible &= (tile + n)[None, :] > position[:, None] - CACHE.window
            v = tl.where((tile + n < length)[:, None], v, 0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        sums = _add_tile(sums, scores, v, scale, pairs, visible, stored_dtype, 1)
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
    out_ptr,
    scale,
    table_stride,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As in prefill_attention.py, but segment by segment."""
    if PDL:
        gdc_launch_dependents()
    query_tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr = query_ptrs
    HEADS: tl.constexpr = CACHE.kv_heads * GROUP
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TOKENS: tl.constexpr = TILE_M // GROUP  # a tile has TOKENS tokens with all query heads of one kv head
    if not PDL:  # pointers: the descriptors are made here, where the strides are constants, so that loads stay wide
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
    if PDL:
        gdc_wait()
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
        if CACHE.window:  # what the window cuts, what all queries see, what causality cuts
            sums = _add_tiles(sums, q, first_key, middle, position, keys, scale, length, CACHE, STAGES, True)
            first_key = middle
        sums = _add_tiles(sums, q, first_key, last, position, keys, scale, length, CACHE, STAGES, False)
        sums = _add_tiles(sums, q, last, end_key, position, keys, scale, length, CACHE, STAGES, True)
        done = _add_segment(done, _segment_of(sums, 1))
    _store_attended(out_ptr, at, done, valid)


def _tile_sizes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Query rows of a tile, and keys, also of one of decodes."""
    return (64 if dtype == torch.float32 or head_dim > 128 else 128), 64


def query_tile_size(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """The number of tokens of a tile, where `group` query heads share a key-value head."""
    return _tile_sizes(head_dim, dtype)[0] // group


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
    heads, head_dim = q.shape[1:]
    tile_m, tile_n = _tile_sizes(head_dim, q.dtype)
    layout = layout_of(k_cache, tile_n, window)
    out = torch.empty_like(q) if out is None else out
    caches = k_cache, v_cache
    if has_tma(q.device):  # a tile is loaded by one instruction
        shape = [layout.tile, head_dim]
        caches = (TensorDescriptor.from_tensor(cache.flatten(0, 1).flatten(1), shape) for cache in caches)
    queries, scale = (query_tiles, cu_seqlens_q, context_lens), head_dim**-0.5 * 1.4426950408889634
    constants = dict(GROUP=heads // layout.kv_heads, TILE_M=tile_m, CACHE=layout, STAGES=5 if head_dim <= 128 else 4)
    launch(_prefill_kernel, (layout.kv_heads, len(query_tiles)), q.device)(
        q, *caches, scales, queries, block_tables, out, scale, block_tables.stride(0), **constants, num_warps=8
    )
    return out


# -- decodes -----------------------------------------------------------------------------------------------------------


@triton.jit
def _segments_of(context_lens_ptr, seq, splits, CACHE: tl.constexpr):
    """The first key that a decoding query sees, the first and the end of its segments, and how many a split has."""
    length = tl.load(context_lens_ptr + seq)
    first = 0
    if CACHE.window:
        first = tl.maximum(length - CACHE.window, 0)
    first_segment, end_segment = first // SEGMENT, tl.cdiv(length, SEGMENT)
    return length, first, first_segment, end_segment, tl.maximum(tl.cdiv(end_segment - first_segment, splits), 1)


@triton.jit
def _store_part(part_ptrs, part, sums, mask, HEAD_DIM: tl.constexpr):
    acc_ptr, total_ptr, largest_ptr = part_ptrs
    acc, total, largest = _segment_of(sums, 0)
    tl.store(acc_ptr + part * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None], acc, mask)
    tl.store(total_ptr + part, total, mask)
    tl.store(largest_ptr + part, largest, mask)


@triton.jit
def _add_parts(part_ptrs, row, num_parts, stride, mask, HEAD_DIM: tl.constexpr):
    """The sums [HEAD_DIM, ROWS] of all segments of some rows [1, ROWS], of which each has stored its own."""
    acc_ptr, total_ptr, largest_ptr = part_ptrs
    ROWS: tl.constexpr = row.shape[1]
    acc, total = tl.zeros([HEAD_DIM, ROWS], tl.float32), tl.zeros([1, ROWS], tl.float32)
    done = acc, total, tl.full([1, ROWS], NO_KEYS, tl.float32)
    for i in range(num_parts):
        part = i * stride + row
        acc = tl.load(acc_ptr + part * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None], mask, 0.0)
        segment = acc, tl.load(total_ptr + part, mask, 0.0), tl.load(largest_ptr + part, mask, NO_KEYS)
        done = _add_segment(done, segment)
    return done


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _decode_kernel(
    q_ptr,
    cache_ptrs,
    seq_ptrs,
    out_ptrs,
    scale,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As in decode_attention.py, but a split has whole segments. Of a sequence with several, it stores each one's sums.

    All is transposed, so that tensor cores multiply 64 keys at a time by the same instructions as in chunks.
    """
    if PDL:
        gdc_launch_dependents()
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    num_seqs_ptr, context_lens_ptr, block_tables_ptr = seq_ptrs
    out_ptr, part_ptrs = out_ptrs
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    KV_HEADS: tl.constexpr = CACHE.kv_heads
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TILE: tl.constexpr = CACHE.tile
    GROUP_PAD: tl.constexpr = max(16, next_power_of_2(GROUP))
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    if num_seqs_ptr is not None:
        num_seqs = tl.load(num_seqs_ptr)
        if seq >= num_seqs:
            return
    table_ptr = block_tables_ptr + seq * table_stride
    length, first, first_segment, end_segment, per_split = _segments_of(context_lens_ptr, seq, splits, CACHE)
    segment = first_segment + tl.program_id(2) * per_split
    if (segment >= end_segment) & (tl.program_id(2) > 0):
        return
    begin = tl.maximum(segment * SEGMENT, first // TILE * TILE)
    end = tl.minimum((segment + per_split) * SEGMENT, length)
    g = tl.arange(0, GROUP_PAD)[None, :]
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    in_group = g < GROUP
    row = seq * (KV_HEADS * GROUP) + kv_head * GROUP + g
    stride = tl.num_programs(1) * (KV_HEADS * GROUP)
    part = row - first_segment * stride  # of segment 0
    if PDL:
        # the cached keys and values are prefetched while the kernel before still runs
        tokens = tl.maximum(tl.minimum(begin + n, end - 1), 0)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
        rows = ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        prefetch_rows(k_cache_ptr + rows, HEAD_DIM)
        prefetch_rows(v_cache_ptr + rows, HEAD_DIM)
        gdc_wait()
    row_at = row * HEAD_DIM + d[:, None]
    q = tl.load(q_ptr + row_at, in_group, 0.0)
    if scales_ptr is not None:
        q = as_fp8_partner(q)
    acc, total = tl.zeros([HEAD_DIM, GROUP_PAD], tl.float32), tl.zeros([64, GROUP_PAD], tl.float32)
    largest = tl.full([1, GROUP_PAD], NO_KEYS, tl.float32)
    b = tl.arange(0, NUM_IDS)
    for first_block in range(begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE), NUM_IDS):
        # many block ids at once: if each tile first had to load its block id, the pipeline of tiles would stall
        block_ids = tl.load(table_ptr + first_block + b, (first_block + b) * BLOCK_SIZE < end, 0)
        known_end = tl.minimum((first_block + NUM_IDS) * BLOCK_SIZE, end)
        for tile in tl.range(tl.maximum(first_block * BLOCK_SIZE, begin), known_end, TILE, num_stages=STAGES):
            inside = tile + n < end
            if CACHE.window:
                inside &= tile + n >= first
            block = tl.sum(tl.where(b == tile // BLOCK_SIZE - first_block, block_ids, 0), 0).to(tl.int64)
            at = ((block * BLOCK_SIZE + tile % BLOCK_SIZE + n) * KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(k_cache_ptr + at[:, None] + d[None, :], inside[:, None], 0.0)
            v = tl.load(v_cache_ptr + at[:, None] + d[None, :], inside[:, None], 0.0)
            pairs = None
            if scales_ptr is not None:
                scale_at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE + n
                pairs = tl.load(scales_ptr + scale_at, inside, ONES)
                k, v = decode_e4m3(k, q.dtype), decode_e4m3(v, q.dtype)
            scores = tl.dot(k, q, input_precision="ieee")
            sums = acc, total, largest
            stored_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
            acc, total, largest = _add_tile(sums, scores, v, scale, pairs, inside[:, None], stored_dtype, 0)
            next_tile = tile + TILE
            if (next_tile // SEGMENT * SEGMENT == next_tile) & (end_segment - first_segment > 1):
                _store_part(part_ptrs, part + stride * (tile // SEGMENT), (acc, total, largest), in_group, HEAD_DIM)
                largest = tl.full(
                    [1, GROUP_PAD], NO_KEYS, tl.float32
                )  # with the next one, these sums shrink to nothing
    if end_segment - first_segment <= 1:
        _store_attended(out_ptr, row_at, _segment_of((acc, total, largest), 0), in_group)
    else:
        end_tile = tl.cdiv(end, TILE) * TILE
        if end_tile // SEGMENT * SEGMENT != end_tile:  # else the loop has stored it
            _store_part(part_ptrs, part + stride * (end // SEGMENT), (acc, total, largest), in_group, HEAD_DIM)
        if first_segment + per_split >= end_segment:  # this program has all
            tl.debug_barrier()
            done = _add_parts(part_ptrs, row, end_segment - first_segment, stride, in_group, HEAD_DIM)
            _store_attended(out_ptr, row_at, done, in_group)


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(seq_ptrs, out_ptrs, splits, HEADS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr):
    """The result of one query and head whose segments several programs have computed."""
    if PDL:
        gdc_launch_dependents()
    num_seqs_ptr, context_lens_ptr = seq_ptrs
    out_ptr, part_ptrs = out_ptrs
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[None, :]
    seq = tl.program_id(0) // HEADS
    if num_seqs_ptr is not None:
        num_seqs = tl.load(num_seqs_ptr)
        if seq >= num_seqs:
            return
    _, _, first_segment, end_segment, per_split = _segments_of(context_lens_ptr, seq, splits, CACHE)
    is_split = first_segment + per_split < end_segment
    if PDL:
        gdc_wait()
    if is_split:
        done = _add_parts(part_ptrs, row, end_segment - first_segment, tl.num_programs(0), row >= 0, HEAD_DIM)
        _store_attended(out_ptr, row * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None], done, row >= 0)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    splits: int | None = None,
    num_seqs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What decode_attention.py has under this name, with the same arguments."""
    batch_size, heads, head_dim = q.shape
    out = torch.empty_like(q) if out is None else out
    layout = layout_of(k_cache, _tile_sizes(head_dim, q.dtype)[1], window)
    num_segments = triton.cdiv(min(max_context_len, (window or max_context_len) + SEGMENT.value), SEGMENT.value)
    splits = splits or choose_num_splits(batch_size * layout.kv_heads, max_context_len, SEGMENT.value, q.device)
    shape = (num_segments, batch_size * heads) if num_segments > 1 else (0, 0)
    parts = [torch.empty((*shape, *x), dtype=torch.float32, device=q.device) for x in ((head_dim,), (), ())]
    seqs, outputs = (num_seqs, context_lens, block_tables), (out, tuple(parts))
    scale = head_dim**-0.5 * 1.4426950408889634  # log2(e): the kernel computes powers of two
    constants = dict(GROUP=heads // layout.kv_heads, CACHE=layout, num_warps=4)
    constants["STAGES"] = 3 if head_dim * k_cache.element_size() <= 256 else 2
    launch(_decode_kernel, (layout.kv_heads, batch_size, splits), q.device)(
        q, (k_cache, v_cache, scales), seqs, outputs, scale, block_tables.stride(0), splits, **constants
    )
    if splits > 1:
        launch(_combine_kernel, (batch_size * heads,), q.device)(
            seqs[:2], outputs, splits, HEADS=heads, CACHE=layout, num_warps=1
        )
    return out

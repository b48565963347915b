"""Computes decode attention in which no bit of a result depends on the batch, or on how programs divide the keys."""

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
from nanovllm.kernels.attention.paged_cache import layout_of, log2_scale, prefetch_rows
from nanovllm.kernels.attention.split_sequence import NO_KEYS, choose_num_splits
from nanovllm.kernels.e4m3 import ONES, as_fp8_partner, decode_e4m3
from nanovllm.kernels.launch.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    next_power_of_2,
)

NUM_IDS = tl.constexpr(16)  # block ids that are loaded at a time


@triton.jit
def _segments_of(context_lens_ptr, seq, splits, CACHE: tl.constexpr):
    """Return (length, first visible key, first segment, end segment, segments per split) of a sequence."""
    length = tl.load(context_lens_ptr + seq)
    first = 0
    if CACHE.window:
        first = tl.maximum(length - CACHE.window, 0)
    first_segment, end_segment = first // SEGMENT, tl.cdiv(length, SEGMENT)
    return length, first, first_segment, end_segment, tl.maximum(tl.cdiv(end_segment - first_segment, splits), 1)


@triton.jit
def _store_part(part_ptrs, part, sums, mask, HEAD_DIM: tl.constexpr):
    acc_ptr, total_ptr, largest_ptr = part_ptrs
    acc, total, largest = segment_of(sums, 0)
    tl.store(acc_ptr + part * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None], acc, mask)
    tl.store(total_ptr + part, total, mask)
    tl.store(largest_ptr + part, largest, mask)


@triton.jit
def _add_parts(part_ptrs, row, num_parts, stride, mask, HEAD_DIM: tl.constexpr):
    """Return the sums over all keys for rows [1, ROWS], from the stored sums of all segments."""
    acc_ptr, total_ptr, largest_ptr = part_ptrs
    ROWS: tl.constexpr = row.shape[1]
    acc, total = tl.zeros([HEAD_DIM, ROWS], tl.float32), tl.zeros([1, ROWS], tl.float32)
    done = acc, total, tl.full([1, ROWS], NO_KEYS, tl.float32)
    for i in range(num_parts):
        part = i * stride + row
        acc = tl.load(acc_ptr + part * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None], mask, 0.0)
        segment = acc, tl.load(total_ptr + part, mask, 0.0), tl.load(largest_ptr + part, mask, NO_KEYS)
        done = add_segment(done, segment)
    return done


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _decode_kernel(
    q_ptr,
    cache_ptrs,
    seq_ptrs,
    sinks_ptr,
    out_ptrs,
    scale,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the attention of a sequence for one split of its keys.

    A split consists of whole segments, unlike in decode_attention.py. All tiles are transposed, as in the prefill
    kernel, because tensor cores then multiply 64 keys at a time.
    """
    gdc_launch_dependents(PDL)
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    num_seqs_ptr, context_lens_ptr, block_tables_ptr = seq_ptrs
    out_ptr, part_ptrs = out_ptrs
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    KV_HEADS: tl.constexpr = CACHE.kv_heads
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TILE: tl.constexpr = CACHE.tile
    GROUP_PAD: tl.constexpr = 16 if GROUP <= 16 else next_power_of_2(GROUP)
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
    head = kv_head * GROUP + tl.minimum(g, GROUP - 1)
    stride = tl.num_programs(1) * (KV_HEADS * GROUP)
    part = row - first_segment * stride  # where the sums of segment 0 would be
    if PDL:
        # prefetch cached keys and values while the previous kernel still runs
        tokens = tl.maximum(tl.minimum(begin + n, end - 1), 0)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
        rows = ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        prefetch_rows(k_cache_ptr + rows, HEAD_DIM)
        prefetch_rows(v_cache_ptr + rows, HEAD_DIM)
    gdc_wait(PDL)
    row_at = row * HEAD_DIM + d[:, None]
    q = tl.load(q_ptr + row_at, in_group, 0.0)
    if scales_ptr is not None:
        q = as_fp8_partner(q)
    acc, total = tl.zeros([HEAD_DIM, GROUP_PAD], tl.float32), tl.zeros([64, GROUP_PAD], tl.float32)
    largest = tl.full([1, GROUP_PAD], NO_KEYS, tl.float32)
    b = tl.arange(0, NUM_IDS)
    for first_block in range(begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE), NUM_IDS):
        # load many block ids together: a load per tile would stall the pipeline of tiles
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
            acc, total, largest = add_tile(
                sums, scores, v, scale, pairs, inside[:, None], stored_dtype, 0, CACHE.soft_cap
            )
            next_tile = tile + TILE
            if (next_tile // SEGMENT * SEGMENT == next_tile) & (end_segment - first_segment > 1):
                _store_part(part_ptrs, part + stride * (tile // SEGMENT), (acc, total, largest), in_group, HEAD_DIM)
                # so that a factor of 0 clears these sums in the next segment
                largest = tl.full([1, GROUP_PAD], NO_KEYS, tl.float32)
    if end_segment - first_segment <= 1:
        store_attended(out_ptr, row_at, segment_of((acc, total, largest), 0), in_group, sinks_ptr, head)
    else:
        end_tile = tl.cdiv(end, TILE) * TILE
        if end_tile // SEGMENT * SEGMENT != end_tile:  # otherwise, the loop has already stored the last segment
            _store_part(part_ptrs, part + stride * (end // SEGMENT), (acc, total, largest), in_group, HEAD_DIM)
        if first_segment + per_split >= end_segment:  # this program has computed all segments
            tl.debug_barrier()
            done = _add_parts(part_ptrs, row, end_segment - first_segment, stride, in_group, HEAD_DIM)
            store_attended(out_ptr, row_at, done, in_group, sinks_ptr, head)


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(seq_ptrs, sinks_ptr, out_ptrs, splits, HEADS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr):
    """Add the segments of a sequence. Each program handles one query head."""
    gdc_launch_dependents(PDL)
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
    gdc_wait(PDL)
    if is_split:
        done = _add_parts(part_ptrs, row, end_segment - first_segment, tl.num_programs(0), row >= 0, HEAD_DIM)
        at = row * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None]
        store_attended(out_ptr, at, done, row >= 0, sinks_ptr, row % HEADS)


def empty_parts(
    num_rows: int, head_dim: int, max_context_len: int, window: int | None, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Allocate memory for the sums of each segment. If there is only one segment, the tensors are empty.

    `num_rows` is the number of queries times the number of heads.
    """
    num_segments = triton.cdiv(min(max_context_len, (window or max_context_len) + SEGMENT.value), SEGMENT.value)
    shape = (num_segments, num_rows) if num_segments > 1 else (0, 0)
    return tuple(torch.empty((*shape, *x), dtype=torch.float32, device=device) for x in ((head_dim,), (), ()))


def decode_attention(
    q: torch.Tensor,
    cache,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    splits: int | None = None,
    num_seqs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tokens_per_row: int = 1,
) -> torch.Tensor:
    """Compute `decode_attention` as defined in decode_attention.py, without `norm_rope_inputs`.

    Unlike the kernel in decode_attention.py, this kernel reads the keys again for each row.
    """
    batch_size, heads, head_dim = q.shape
    out = torch.empty_like(q) if out is None else out
    layout = layout_of(cache, tile_sizes(head_dim, q.dtype)[1])
    splits = splits or choose_num_splits(batch_size, layout.kv_heads, max_context_len, SEGMENT.value, q.device)
    parts = empty_parts(batch_size * heads, head_dim, max_context_len, cache.spec.window, q.device)
    seqs, outputs = (num_seqs, context_lens, block_tables), (out, parts)
    caches, scale = (cache.k, cache.v, cache.scales), log2_scale(cache)
    constants = dict(GROUP=heads // layout.kv_heads, CACHE=layout, num_warps=4)
    constants["STAGES"] = 3 if head_dim * cache.k.element_size() <= 256 else 2
    launch(_decode_kernel, (layout.kv_heads, batch_size, splits), q.device)(
        q, caches, seqs, cache.spec.sinks, outputs, scale, block_tables.stride(0), splits, **constants
    )
    if splits > 1:
        launch(_combine_kernel, (batch_size * heads,), q.device)(
            seqs[:2], cache.spec.sinks, outputs, splits, HEADS=heads, CACHE=layout, num_warps=1
        )
    return out

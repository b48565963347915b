"""One query a sequence against its paged keys and values, cut into splits that run side by side (flash-decoding)."""
import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, prefetch_rows

TILE = 64  # keys of a tile, which lies in one block
CHUNK = 16  # blocks that are looked up at a time
MAX_SPLITS = 16  # of one sequence
PROGRAMS = 8  # per multiprocessor, two at a time: enough for the last ones not to be waited for long
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of nothing; finite, so that no NaN can come of it


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, context_lens_ptr, block_tables_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr,
    scale, table_stride, splits,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    table_ptr = block_tables_ptr + seq * table_stride
    length = tl.load(context_lens_ptr + seq)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(length, splits), TILE), 1) * TILE
    begin = split * per_split
    if (begin >= length) & (split > 0):
        return
    end = tl.minimum(begin + per_split, length)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    if PDL:
        # what is in the cache already can be on its way while the kernel before still runs
        tokens = tl.maximum(tl.minimum(begin + n, end - 1), 0)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
        rows = ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        prefetch_rows(k_cache_ptr + rows, HEAD_DIM)
        prefetch_rows(v_cache_ptr + rows, HEAD_DIM)
        gdc_wait()

    first_row = seq * (KV_HEADS * GROUP) + kv_head * GROUP
    q = tl.load(q_ptr + (first_row + g)[:, None] * HEAD_DIM + d[None, :], (g < GROUP)[:, None], 0.0)

    top = tl.full([GROUP_PAD], NO_KEYS, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    b = tl.arange(0, CHUNK)
    for chunk in range(begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE), CHUNK):
        # ids of many blocks at once: an address that waits for a load of its own would stall the pipeline of tiles
        block_ids = tl.load(table_ptr + chunk + b, (chunk + b) * BLOCK_SIZE < end, 0)
        chunk_end = tl.minimum((chunk + CHUNK) * BLOCK_SIZE, end)
        for tile in tl.range(tl.maximum(chunk * BLOCK_SIZE, begin), chunk_end, TILE, num_stages=STAGES):
            inside = tile + n < end
            block = tl.sum(tl.where(b == tile // BLOCK_SIZE - chunk, block_ids, 0), 0).to(tl.int64)
            row = ((block * BLOCK_SIZE + tile % BLOCK_SIZE + n) * KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(k_cache_ptr + row[None, :] + d[:, None], inside[None, :], 0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            scores = tl.where(inside[None, :], scores, NO_KEYS)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            v = tl.load(v_cache_ptr + row[:, None] + d[None, :], inside[:, None], 0.0)
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            total = total * decay + tl.sum(p, 1)
            top = new_top

    acc = acc / tl.maximum(total, 1e-30)[:, None]
    num_splits = tl.cdiv(length, per_split)
    if num_splits <= 1:
        out = out_ptr + (first_row + g)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), (g < GROUP)[:, None])
    else:
        partial_row = (first_row + g) * splits + split
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + d[None, :], acc, (g < GROUP)[:, None])
        tl.store(lse_ptr + partial_row, top + tl.log2(total), g < GROUP)
        # Whoever comes last finds the others' parts in memory, and leaves the counter as it was.
        tl.debug_barrier()
        arrived = arrived_ptr + seq * KV_HEADS + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrived, 0)
            s = tl.arange(0, MAX_SPLITS)
            there = s < num_splits
            for i in tl.static_range(GROUP):
                part = (first_row + i) * splits + s
                lse = tl.load(lse_ptr + part, there, NO_KEYS, cache_modifier=".cg")
                weight = tl.exp2(lse - tl.max(lse, 0))
                at = part[:, None] * HEAD_DIM + d[None, :]
                parts = tl.load(partial_ptr + at, there[:, None], 0.0, cache_modifier=".cg")
                whole = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
                tl.store(out_ptr + (first_row + i) * HEAD_DIM + d, whole.to(out_ptr.dtype.element_ty))


def most_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """How many splits the longest sequence may have, where there are `num_programs` sequences times kv heads."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = PROGRAMS * processors // max(1, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context_len, TILE), MAX_SPLITS))


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context_lens: torch.Tensor,
    block_tables: torch.Tensor, max_context_len: int, arrived: torch.Tensor, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [B, heads, head_dim], contiguous, attends to the context_lens[b] tokens behind block_tables[b]; zeros where there are none.

    caches [blocks, block_size, kv_heads, head_dim], block_size a multiple of 16, head_dim a power of two from 16;
    context_lens [B], block_tables [B, W] int32; arrived [>= B * kv_heads] int32, zero before and after. A sequence gets
    as many splits as it has tokens for, up to `splits`, for which `max_context_len` is a guide. Programs start in the
    order of the rows: the longest should come first.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    splits = splits or most_splits(batch * kv_heads, max_context_len, q.device)
    out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(kv_heads, batch, splits)](
        q, k_cache, v_cache, context_lens, block_tables, out, partial, lse, arrived,
        head_dim**-0.5 * 1.4426950408889634, block_tables.stride(0), splits,
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, TILE=min(TILE, block_size & -block_size), CHUNK=CHUNK, MAX_SPLITS=MAX_SPLITS, STAGES=3 if head_dim <= 128 else 2,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=2, **launch_options(q.device),
    )  # fmt: skip
    return out

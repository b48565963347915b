"""One query a sequence against its paged keys and values, cut into splits that run side by side (flash-decoding)."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch, num_sms, prefetch_rows
from nanovllm.kernels.norm_rope_store import norm_rope

TILE = 64  # keys of a tile, which lies in one block
CHUNK = 16  # blocks that are looked up at a time
MAX_SPLITS = 16  # of one sequence
PROGRAMS = 8  # per multiprocessor, two or three at a time: the last ones are not to be waited for long
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of nothing; finite, so that no NaN can come of it


@triton.jit
def _split_up(context_lens_ptr, seq, splits, IS_QKV: tl.constexpr, TILE: tl.constexpr):
    """Tokens of a sequence that are in the cache, how many of them a split has, and how many splits have any.

    The first split is always there: it has the new token, or writes the zeros of an empty sequence.
    """
    num_cached = tl.load(context_lens_ptr + seq) - (1 if IS_QKV else 0)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_cached, splits), TILE), 1) * TILE
    return num_cached, per_split, tl.maximum(tl.cdiv(num_cached, per_split), 1)


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    context_lens_ptr,
    block_tables_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    scale,
    eps,
    table_stride,
    splits,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_QKV: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    table_ptr = block_tables_ptr + seq * table_stride
    num_cached, per_split, num_splits = _split_up(context_lens_ptr, seq, splits, IS_QKV, TILE)
    if split >= num_splits:
        return
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_cached)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    in_group = (g < GROUP)[:, None]
    other = (d + HEAD_DIM // 2) % HEAD_DIM
    if IS_QKV:  # none of this is what the kernel before writes
        cos = tl.load(cos_sin_ptr + seq * (2 * HEAD_DIM) + d)
        sin = tl.load(cos_sin_ptr + seq * (2 * HEAD_DIM) + HEAD_DIM + d)
        q_cos, q_sin = cos * tl.load(q_weight_ptr + d), sin * tl.load(q_weight_ptr + other)
        k_cos, k_sin = cos * tl.load(k_weight_ptr + d), sin * tl.load(k_weight_ptr + other)
        slot = tl.load(slot_mapping_ptr + seq).to(tl.int64)
    if PDL:
        # what is in the cache already can be on its way while the kernel before still runs
        tokens = tl.maximum(tl.minimum(begin + n, end - 1), 0)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
        rows = ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        prefetch_rows(k_cache_ptr + rows, HEAD_DIM)
        prefetch_rows(v_cache_ptr + rows, HEAD_DIM)
        gdc_wait()

    first_row = seq * (KV_HEADS * GROUP) + kv_head * GROUP
    top = tl.full([GROUP_PAD], NO_KEYS, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    if IS_QKV:
        qkv = q_ptr + seq * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
        q_row = qkv + (kv_head * GROUP + g)[:, None] * HEAD_DIM
        k_row = qkv + (GROUP * KV_HEADS + kv_head) * HEAD_DIM
        q = tl.load(q_row + d[None, :], in_group, 0.0)
        q_other = tl.load(q_row + other[None, :], in_group, 0.0)
        k_new = tl.load(k_row + d)[None, :]
        k_other = tl.load(k_row + other)[None, :]
        v_new = tl.load(k_row + KV_HEADS * HEAD_DIM + d)[None, :]
        q = norm_rope(q, q_other, q_cos[None, :], q_sin[None, :], eps)
        if split == 0:  # it has the new token, whose key and value need not come by way of the cache
            k_new = norm_rope(k_new, k_other, k_cos[None, :], k_sin[None, :], eps)
            at = (slot * KV_HEADS + kv_head) * HEAD_DIM + d[None, :]
            tl.store(k_cache_ptr + at, k_new, at >= 0)  # a slot of -1 is before the cache
            tl.store(v_cache_ptr + at, v_new, at >= 0)
            top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            total += 1.0
            acc += v_new.to(tl.float32)
    else:
        q = tl.load(q_ptr + (first_row + g)[:, None] * HEAD_DIM + d[None, :], in_group, 0.0)

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
    if IS_SPLIT:
        part = (first_row + g) * splits + split
        tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), NO_KEYS), g < GROUP)
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, in_group)
    else:
        out = out_ptr + (first_row + g)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), in_group)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    IS_QKV: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, MAX_SPLITS)
    num_splits = _split_up(context_lens_ptr, row // HEADS, splits, IS_QKV, TILE)[2]
    there = split < num_splits
    part = row * splits + split
    if PDL:
        gdc_wait()
    lse = tl.load(lse_ptr + part, there, NO_KEYS)
    parts = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], there[:, None], 0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    out = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty))


def choose_num_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """How many splits the longest sequence may have, where there are `num_programs` sequences times kv heads."""
    wanted = PROGRAMS * num_sms(device) // max(1, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context_len, TILE), MAX_SPLITS))


def fuses_qk_norm_rope(batch: int, kv_heads: int, device: torch.device) -> bool:
    """Whether there are so few sequences that a kernel less counts more than what each program does besides.

    With more of them, each would norm and turn while its multiprocessor could read.
    """
    return batch * kv_heads <= 2 * num_sms(device)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    splits: int | None = None,
    new: tuple | None = None,
) -> torch.Tensor:
    """q [B, heads, head_dim] attends to the context_lens[b] tokens behind block_tables[b]; zeros where there are none.

    caches [blocks, block_size, kv_heads, head_dim], block_size a multiple of 16, head_dim a power of two from 16;
    context_lens [B], block_tables [B, W] int32; all but the tables contiguous. A sequence gets as many splits as it has
    tiles for, up to `splits`, for which `max_context_len` is a guide. Programs start in the order of the rows: the
    longest should come first.

    With new = (q_weight, k_weight, eps, cos_sin, slot_mapping), q is qkv [B, heads + 2 kv_heads, head_dim] as
    `norm_rope_store` takes it, and what that does is done here too. An empty sequence then gets any finite values.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    heads -= 2 * kv_heads if new else 0
    group = heads // kv_heads
    splits = splits or choose_num_splits(batch * kv_heads, max_context_len, q.device)
    out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    partial = lse = out
    if splits > 1:
        partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    q_weight, k_weight, eps, cos_sin, slot_mapping = new or (None, None, 0.0, None, None)
    tile = min(TILE, block_size & -block_size)  # the largest power of two that divides the block, or less
    launch(_decode_kernel, (kv_heads, batch, splits), q.device, shared=50 if new else 100)(
        q,
        k_cache,
        v_cache,
        context_lens,
        block_tables,
        out,
        partial,
        lse,
        q_weight,
        k_weight,
        cos_sin,
        slot_mapping,
        head_dim**-0.5 * 1.4426950408889634,
        eps,
        block_tables.stride(0),
        splits,
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        TILE=tile,
        CHUNK=CHUNK,
        STAGES=3 if head_dim * q.element_size() <= 256 and not new else 2,
        IS_QKV=new is not None,
        IS_SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=2,
    )
    if splits > 1:
        launch(_combine_kernel, (batch * heads,), q.device, shared=50)(
            partial,
            lse,
            context_lens,
            out,
            splits,
            HEADS=heads,
            HEAD_DIM=head_dim,
            TILE=tile,
            MAX_SPLITS=MAX_SPLITS,
            IS_QKV=new is not None,
            num_warps=2,
        )
    return out

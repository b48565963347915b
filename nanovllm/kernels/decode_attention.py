"""One query a sequence against its paged keys and values, cut into splits that run side by side (flash-decoding)."""
import torch
import triton
import triton.language as tl

BLOCK_N = 64  # keys of a tile
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of nothing; finite, so that no NaN can come of it


@triton.jit
def _decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, context_lens_ptr, block_tables_ptr, out_ptr, partial_ptr, lse_ptr,
    scale, q_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(context_lens_ptr + seq)
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    head = kv_head * GROUP + g
    q = tl.load(q_ptr + seq * q_stride + head[:, None] * HEAD_DIM + d[None, :], (g < GROUP)[:, None], 0.0)

    top = tl.full([GROUP_PAD], NO_KEYS, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    for tile in tl.range(begin, end, TILE, num_stages=STAGES):
        token = tile + n
        inside = token < end
        if BLOCK_SIZE % TILE == 0:  # the whole tile lies in one block
            block = tl.load(block_tables_ptr + seq * table_stride + tile // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + tile % BLOCK_SIZE + n
        else:
            block = tl.load(block_tables_ptr + seq * table_stride + token // BLOCK_SIZE, inside, 0).to(tl.int64)
            slot = block * BLOCK_SIZE + token % BLOCK_SIZE
        row = (slot * KV_HEADS + kv_head) * HEAD_DIM
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

    out_row = seq * (KV_HEADS * GROUP) + head
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    if SPLITS == 1:
        out = out_ptr + out_row[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), (g < GROUP)[:, None])
    else:
        partial_row = out_row * SPLITS + split
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + d[None, :], acc, (g < GROUP)[:, None])
        lse = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), NO_KEYS)
        tl.store(lse_ptr + partial_row, lse, g < GROUP)


@triton.jit
def _combine_kernel(partial_ptr, lse_ptr, out_ptr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = row * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + split)
    weight = tl.exp2(lse - tl.max(lse, 0))
    partial = tl.load(partial_ptr + split[:, None] * HEAD_DIM + d[None, :])
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty))


def num_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """Enough splits for four programs on every multiprocessor, as a power of two, and none without a tile to read."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = max(1, min(4 * processors // max(1, num_programs), triton.cdiv(max_context_len, BLOCK_N), 32))
    return 1 << (wanted.bit_length() - 1)


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context_lens: torch.Tensor,
    block_tables: torch.Tensor, max_context_len: int, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [B, heads, head_dim] attends to the context_lens[b] tokens behind block_tables[b]; zeros where there are none.

    caches [blocks, block_size, kv_heads, head_dim], block_size a multiple of 16, head_dim a power of two from 16;
    context_lens [B], block_tables [B, W] int32. `max_context_len` only guides the number of splits, a power of two.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    splits = splits or num_splits(batch * kv_heads, max_context_len, q.device)
    out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    partial = lse = out
    if splits > 1:
        partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(batch, kv_heads, splits)](
        q, k_cache, v_cache, context_lens, block_tables, out, partial, lse,
        head_dim**-0.5 * 1.4426950408889634, q.stride(0), block_tables.stride(0),
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, TILE=BLOCK_N, SPLITS=splits, STAGES=3 if head_dim <= 128 else 2,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=2,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(batch * heads,)](partial, lse, out, HEAD_DIM=head_dim, SPLITS=splits, num_warps=2)
    return out

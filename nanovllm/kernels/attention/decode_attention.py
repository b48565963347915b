"""Attention for decode steps, over paged keys and values.

A sequence has queries for its newest token and for a few draft tokens. The keys of a sequence are divided among several
programs (flash-decoding).
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.norm_rope_store import load_cos_sin, norm_rope
from nanovllm.kernels.attention.paged_cache import (
    LOG2_E,
    add_sinks,
    layout_of,
    log2_scale,
    prefetch_rows,
    tanh_of_scores,
)
from nanovllm.kernels.attention.split_sequence import (
    NO_KEYS,
    PROGRAMS_PER_SM,
    choose_num_splits,
    combine_splits,
    split_sequence,
)
from nanovllm.kernels.e4m3 import ONES, as_fp8_partner, decode_e4m3, decode_e4m3_pairs, store_row, unpack_scales
from nanovllm.kernels.launch.dependent_launch import (
    IS_TRITON_3_4,
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    launch,
)
from nanovllm.kernels.launch.gpu_features import has_tma, num_sms

TILE = 64  # keys per tile, all in one cache block; fewer if a key has many bytes
NUM_IDS = tl.constexpr(16)  # block ids that are loaded at a time
MAX_QUERIES = 64  # query rows per program: all query heads of a sequence's new tokens that share a key-value head
NO_NORM_ROPE = None, None, 0.0, None, None  # weights, eps, cos_sin, slots


@triton.jit
def _load_rotation(norm_rope_ptrs, seq, d, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Return cos and sin for queries and for keys, and the index of each element's partner in the rotation.

    If q and k have norm weights, the returned cos and sin are already multiplied by the weights.
    """
    q_weight_ptr, k_weight_ptr = norm_rope_ptrs[0], norm_rope_ptrs[1]
    cos, sin, swapped = load_cos_sin(norm_rope_ptrs[3], seq, d, HEAD_DIM, ROTARY)
    q_cos, q_sin, k_cos, k_sin = cos, sin, cos, sin
    if q_weight_ptr is not None:
        q_cos, q_sin = cos * tl.load(q_weight_ptr + d), sin * tl.load(q_weight_ptr + swapped)
        k_cos, k_sin = cos * tl.load(k_weight_ptr + d), sin * tl.load(k_weight_ptr + swapped)
    return q_cos, q_sin, k_cos, k_sin, swapped


@triton.jit
def _prefetch_tile(cache_ptrs, table_ptr, kv_head, tokens, CACHE: tl.constexpr):
    """Prefetch the keys, values and scales of `tokens` [TILE] into the L2 cache."""
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
    rows = ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * CACHE.kv_heads + kv_head) * CACHE.head_dim
    prefetch_rows(k_cache_ptr + rows, CACHE.head_dim)
    prefetch_rows(v_cache_ptr + rows, CACHE.head_dim)
    if scales_ptr is not None:
        scale_rows = (blocks * CACHE.kv_heads + kv_head) * BLOCK_SIZE + tokens % BLOCK_SIZE
        prefetch_rows(scales_ptr + scale_rows, 1)


@triton.jit
def _store_new_token(k, v, cache_ptrs, slot, kv_head, d, CACHE: tl.constexpr):
    """Unless `slot` is -1, store a key `k` and a value `v`, both [1, head_dim].

    Return the stored key and its scale, then the stored value and its scale. FP8 storage rounds keys and values.
    Attention in this step must use the same rounded numbers that later steps will read.
    """
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    at = (slot * CACHE.kv_heads + kv_head) * CACHE.head_dim + d[None, :]
    if scales_ptr is not None:
        scale_at = (slot // CACHE.block_size * CACHE.kv_heads + kv_head) * CACHE.block_size + slot % CACHE.block_size
        pair_ptr = (scales_ptr + scale_at).to(tl.pointer_type(tl.int16))
        k, k_scale = store_row(k, k_cache_ptr + at, pair_ptr, slot)
        v, v_scale = store_row(v, v_cache_ptr + at, pair_ptr + 1, slot)
    else:
        tl.store(k_cache_ptr + at, k, at >= 0)  # negative for a slot of -1
        tl.store(v_cache_ptr + at, v, at >= 0)
        k_scale, v_scale = 1.0, 1.0
    return k, k_scale, v, v_scale


@triton.jit
def _scores_of_tile(q, k_ptrs, pair_ptrs, inside, scale, STORED: tl.constexpr, CAP: tl.constexpr):
    """Return the scores [TILE, GROUP_PAD] of a tile of keys, and log2 of the FP8 scales [TILE] of the tile's values."""
    k = tl.load(k_ptrs, inside[:, None], 0.0)
    v_log2_scale = 0.0
    if pair_ptrs is not None:
        k = decode_e4m3(k, q.dtype)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    if CAP == 0.0:
        scores = scores * scale
    if pair_ptrs is not None:
        k_scale, v_log2_scale = unpack_scales(tl.load(pair_ptrs, inside, ONES), STORED)
        scores = scores * k_scale[:, None]
    if CAP != 0.0:
        scores = tanh_of_scores(scores, scale, CAP) * (CAP * LOG2_E)
    if pair_ptrs is not None:
        scores = scores + v_log2_scale[:, None]
    return scores, v_log2_scale


@triton.jit
def _store_result(acc, m_i, l_i, row, is_row, d, split, splits, out_ptrs, HEAD_DIM: tl.constexpr):
    """Divide `acc` [GROUP_PAD, head_dim] by the sums of softmax weights, and store the result.

    If the sequence has several splits, the result covers only one split.
    """
    out_ptr, partial_ptr, lse_ptr = out_ptrs
    acc = acc / tl.maximum(l_i, 1e-30)[:, None]
    if partial_ptr is not None:
        part = row * splits + split
        tl.store(lse_ptr + part, tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), NO_KEYS), is_row)
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, is_row[:, None])
    else:
        out = out_ptr + row[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), is_row[:, None])


@dependent_kernel(early=("seq_ptrs", "norm_rope_ptrs"))
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _decode_kernel(
    q_ptr,
    norm_rope_ptrs,
    cache_ptrs,
    seq_ptrs,
    sinks_ptr,
    out_ptrs,
    scale,
    q_stride,
    table_stride,
    splits,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    CACHE: tl.constexpr,
    ROTARY: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention for one split of a sequence's keys. The sequence has ROWS query tokens.

    The program (kv_head, sequence, split) handles all query heads that share the key-value head. Before `gdc_wait`, the
    program reads no memory that the previous kernel writes.
    """
    gdc_launch_dependents(PDL)
    k_cache_ptr, v_cache_ptr, scales_ptr = cache_ptrs
    num_seqs_ptr, context_lens_ptr, block_tables_ptr = seq_ptrs
    IS_QKV: tl.constexpr = norm_rope_ptrs[3] is not None
    HAS_NORM: tl.constexpr = norm_rope_ptrs[0] is not None
    IS_FP8: tl.constexpr = scales_ptr is not None
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    KV_HEADS: tl.constexpr = CACHE.kv_heads
    HEAD_DIM: tl.constexpr = CACHE.head_dim
    TILE: tl.constexpr = CACHE.tile
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if num_seqs_ptr is not None and seq * ROWS >= tl.load(num_seqs_ptr):
        return
    table_ptr = block_tables_ptr + seq * ROWS * table_stride
    first, num_cached, per_split, num_splits = split_sequence(context_lens_ptr, seq, splits, IS_QKV, ROWS, CACHE)
    if split >= num_splits:
        return
    begin = first // TILE * TILE + split * per_split
    end = tl.minimum(begin + per_split, num_cached)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    is_row = g < ROWS * GROUP
    if IS_QKV:
        q_cos, q_sin, k_cos, k_sin, swapped = _load_rotation(norm_rope_ptrs, seq, d, HEAD_DIM, ROTARY)
        slot = tl.load(norm_rope_ptrs[4] + seq).to(tl.int64)
    if PDL:
        _prefetch_tile(cache_ptrs, table_ptr, kv_head, tl.maximum(tl.minimum(begin + n, end - 1), 0), CACHE)
    gdc_wait(PDL)

    if ROWS == 1:
        row = seq * (KV_HEADS * GROUP) + kv_head * GROUP + g
    else:  # the rows of a sequence see different numbers of keys
        row = (seq * ROWS + g // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + g % GROUP
        lengths = tl.load(context_lens_ptr + seq * ROWS + g // GROUP, is_row, 0)[None, :]
    m_i = tl.full([GROUP_PAD], NO_KEYS, tl.float32)  # the running maximum of the scores
    l_i = tl.zeros([GROUP_PAD], tl.float32)  # the sum of exp2(score - m_i)
    acc = tl.zeros([HEAD_DIM, GROUP_PAD], tl.float32)
    if IS_FP8:  # a 16-bit word holds two adjacent elements of a value: one even, one odd
        acc_even = tl.zeros([HEAD_DIM // 2, GROUP_PAD], tl.float32)
        acc_odd = tl.zeros([HEAD_DIM // 2, GROUP_PAD], tl.float32)
        pair = tl.arange(0, HEAD_DIM // 2)
        v_pair_ptr = v_cache_ptr.to(tl.pointer_type(tl.uint16))
    if IS_QKV:
        qkv = q_ptr + seq * q_stride
        q_row = qkv + (kv_head * GROUP + g)[:, None] * HEAD_DIM
        k_row = qkv + (GROUP * KV_HEADS + kv_head) * HEAD_DIM
        q = tl.load(q_row + d[None, :], is_row[:, None], 0.0)
        q_swapped = tl.load(q_row + swapped[None, :], is_row[:, None], 0.0)
        k_new = tl.load(k_row + d)[None, :]
        k_swapped = tl.load(k_row + swapped)[None, :]
        v_new = tl.load(k_row + KV_HEADS * HEAD_DIM + d)[None, :]
        q = norm_rope(q, q_swapped, q_cos[None, :], q_sin[None, :], norm_rope_ptrs[2], HAS_NORM)
        if split == 0:  # the new key and value are in registers, and need not be read from the cache
            k_new = norm_rope(k_new, k_swapped, k_cos[None, :], k_sin[None, :], norm_rope_ptrs[2], HAS_NORM)
            k_read, k_scale, v_read, v_scale = _store_new_token(k_new, v_new, cache_ptrs, slot, kv_head, d, CACHE)
            m_i = tl.sum(q.to(tl.float32) * k_read.to(tl.float32), 1) * (scale * k_scale)
            if CACHE.soft_cap != 0.0:
                m_i = tanh_of_scores(m_i, 1.0, CACHE.soft_cap) * (CACHE.soft_cap * LOG2_E)
            if IS_FP8:
                m_i += tl.log2(v_scale)
                l_i += 1 / v_scale
                v_even, v_odd = tl.split(v_read.reshape(1, HEAD_DIM // 2, 2))
                acc_even += tl.trans(v_even)
                acc_odd += tl.trans(v_odd)
            else:
                l_i += 1.0
                acc += tl.trans(v_read.to(tl.float32))
    else:
        q = tl.load(q_ptr + row[:, None] * HEAD_DIM + d[None, :], is_row[:, None], 0.0)
    if IS_FP8:
        q = as_fp8_partner(q)

    b = tl.arange(0, NUM_IDS)
    key = n * (KV_HEADS * HEAD_DIM)  # offsets of the keys of a tile from the first key
    for first_block in range(begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE), NUM_IDS):
        # load many block ids together: a load per tile would stall the pipeline of tiles
        block_ids = tl.load(table_ptr + first_block + b, (first_block + b) * BLOCK_SIZE < end, 0)
        known_end = tl.minimum((first_block + NUM_IDS) * BLOCK_SIZE, end)
        for tile in tl.range(tl.maximum(first_block * BLOCK_SIZE, begin), known_end, TILE, num_stages=STAGES):
            inside = tile + n < end
            if CACHE.window:  # only the first tile can have keys in front of the window
                inside &= tile + n >= first
            block = tl.sum(tl.where(b == tile // BLOCK_SIZE - first_block, block_ids, 0), 0).to(tl.int64)
            first_key = ((block * BLOCK_SIZE + tile % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
            pair_ptrs = None
            if IS_FP8:
                scale_at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE
                pair_ptrs = scales_ptr + scale_at + n
            k_ptrs = k_cache_ptr + first_key + (key[:, None] + d[None, :])
            stored: tl.constexpr = k_cache_ptr.dtype.element_ty
            scores, v_log2_scale = _scores_of_tile(q, k_ptrs, pair_ptrs, inside, scale, stored, CACHE.soft_cap)
            visible = inside[:, None]
            if ROWS > 1:
                visible &= (tile + n)[:, None] < lengths
                if CACHE.window:
                    visible &= (tile + n)[:, None] >= lengths - CACHE.window
            scores = tl.where(visible, scores, NO_KEYS)
            m_new = tl.maximum(m_i, tl.max(scores, 0))
            p = tl.exp2(scores - m_new[None, :])
            if ROWS > 1:  # until a row has seen a key, m_new is NO_KEYS, and hidden keys would get the weight 1
                p = tl.where(visible, p, 0.0)
            alpha = tl.exp2(m_i - m_new)
            if IS_FP8:
                v = tl.load(v_pair_ptr + first_key // 2 + ((key // 2)[None, :] + pair[:, None]), inside[None, :], 0)
                v_even, v_odd = decode_e4m3_pairs(v, v_cache_ptr.dtype.element_ty, q.dtype)
                acc_even = acc_even * alpha[None, :] + tl.dot(v_even, p.to(q.dtype), input_precision="ieee")
                acc_odd = acc_odd * alpha[None, :] + tl.dot(v_odd, p.to(q.dtype), input_precision="ieee")
                p = p * tl.exp2(-v_log2_scale)[:, None]
            else:
                v = tl.load(v_cache_ptr + first_key + (key[None, :] + d[:, None]), inside[None, :], 0.0)
                acc = acc * alpha[None, :] + tl.dot(v, p.to(v.dtype), input_precision="ieee")
            l_i = l_i * alpha + tl.sum(p, 0)
            m_i = m_new

    acc = tl.interleave(tl.trans(acc_even), tl.trans(acc_odd)) if IS_FP8 else tl.trans(acc)
    if sinks_ptr is not None:  # the first split adds the sinks
        sinks = tl.load(sinks_ptr + kv_head * GROUP + g % GROUP).to(tl.float32) * LOG2_E
        acc, m_i, l_i = add_sinks(acc, m_i, l_i, tl.where(split == 0, sinks, NO_KEYS))
    _store_result(acc, m_i, l_i, row, is_row, d, split, splits, out_ptrs, HEAD_DIM)


def fuses_qk_norm_rope(batch_size: int, kv_heads: int, device: torch.device) -> bool:
    """Return whether `decode_attention` should also compute the norms, rotation and cache store of qkv.

    The fused kernel saves a kernel launch. If the programs of the fused kernel can't all run at the same time, separate
    kernels are faster.
    """
    return batch_size * kv_heads <= 2 * num_sms(device)


def _choose_programs(batch_size, tokens_per_row, cache, row_bytes, is_qkv) -> tuple[int, int, int]:
    """Return (programs per multiprocessor, warps per program, tiles loaded ahead).

    The choice is based on measurements. With two programs of four warps, a multiprocessor reads fastest, but has no
    room for a program of the next kernel.
    """
    has_few_splits = batch_size * cache.k.shape[2] * 3 > 2 * num_sms(cache.k.device)  # at most two splits
    are_fastest = is_qkv and (row_bytes > 256 or (row_bytes == 256 and has_few_splits))
    if batch_size == 1 or tokens_per_row > 1 or are_fastest:
        return 2, 4, 2 if row_bytes > 256 else 4 if batch_size == tokens_per_row == 1 and has_tma(cache.k.device) else 3
    return PROGRAMS_PER_SM, 4 if cache.scales is not None and not is_qkv else 2, 2 if is_qkv or row_bytes > 256 else 3


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
    norm_rope_inputs: tuple = NO_NORM_ROPE,
) -> torch.Tensor:
    """Return the attention of each row b of q to the first `context_lens[b]` cached tokens of the row's sequence.

    q and the result are [B, heads, head_dim]. If a row's context length is 0, its result is zero. The cached tokens of
    row b are in the blocks `block_tables[b]`.

    cache: `block_size` is a multiple of 16, and `head_dim` is a power of two, at least 16.
    context_lens, block_tables: int32 tensors [B] and [B, W]. All tensors except `block_tables` are contiguous.
    splits: the maximum number of splits per sequence. A sequence has at most as many splits as tiles of keys. The
        default number of splits depends on `max_context_len`, an upper bound on `context_lens`. The longest sequences
        should come first, because programs start in the order of rows.
    num_seqs: [1] int32, the number of rows to compute, at least 1. Rows of the result after the first `num_seqs` stay
        unchanged.
    out: receives the result.
    tokens_per_row: the number of consecutive rows that belong to one sequence. The rows of a sequence share a block
        table, and each row sees at least as many keys as the row before it.
    norm_rope_inputs: the arguments `qk_norm_rope` and `slot_mapping` of `norm_rope_and_store`. With `norm_rope_inputs`,
        the kernel also does the work of `norm_rope_and_store`. With `norm_rope_inputs`, q is qkv [B, heads + 2 *
        kv_heads, head_dim], with any stride between tokens, and the result of an empty sequence is finite but
        undefined.
    """
    is_qkv, kv_heads = norm_rope_inputs is not NO_NORM_ROPE, cache.k.shape[2]
    out = torch.empty_like(q[:, 2 * kv_heads :] if is_qkv else q) if out is None else out
    num_rows, heads, head_dim = out.shape
    group, row_bytes = heads // kv_heads, head_dim * cache.k.element_size()
    tokens_per_row = tokens_per_row if tokens_per_row * group <= MAX_QUERIES else 1
    batch_size = num_rows // tokens_per_row
    # with qkv, two tiles of keys and two of values must fit into shared memory
    layout = layout_of(cache, min(TILE, 2**15 // row_bytes) if is_qkv else TILE if row_bytes <= 256 else TILE // 2)
    max_num_keys = min(max_context_len, cache.spec.window or max_context_len)
    programs, num_warps, stages = _choose_programs(batch_size, tokens_per_row, cache, row_bytes, is_qkv)
    splits = splits or choose_num_splits(batch_size, kv_heads, max_num_keys, layout.tile, q.device, programs)
    parts = None, None
    if splits > 1:
        shapes = (num_rows, heads, splits, head_dim), (num_rows, heads, splits)
        parts = tuple(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    caches, seqs = (cache.k, cache.v, cache.scales), (num_seqs, context_lens, block_tables)
    constants = dict(ROWS=tokens_per_row, GROUP=group, CACHE=layout, STAGES=stages, num_warps=num_warps)
    # queries are columns of the matmuls and keys are rows, because tensor cores need only 8 columns, but 16 rows
    constants["GROUP_PAD"] = max(16 if IS_TRITON_3_4 else 8, triton.next_power_of_2(tokens_per_row * group))
    constants["ROTARY"] = norm_rope_inputs[3].shape[2] if is_qkv else head_dim
    pointers, scale = (q, norm_rope_inputs, caches, seqs, cache.spec.sinks, (out, *parts)), log2_scale(cache)
    # the shared-memory percentage (see `launch`): near that of the matmuls, and the same for all launches of a compiled
    # kernel
    shared = (75 if splits == 1 else 50) if is_qkv else 100
    launch(_decode_kernel, (kv_heads, batch_size, splits), q.device, shared=shared)(
        *pointers, scale, q.stride(0), block_tables.stride(0), splits, **constants
    )
    if splits > 1:
        combine_splits(parts, seqs[:2], out, layout, is_qkv, tokens_per_row)
    return out

"""Prefill attention for Hopper (FlashAttention-3, arXiv:2407.08608), written in Gluon.

One warp loads tiles, and two warpgroups compute attention. A query tile has 128 rows (64 for each warpgroup). Each row
is one query head of one token. A tile covers a *pack*: some of the query heads that share a key-value head. The size of
a pack is the largest power of two that divides the number of query heads per key-value head.

The warpgroups alternate. While warpgroup A computes a softmax, the tensor cores work for warpgroup B, or multiply A's
previous softmax weights by values.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.attention.paged_cache import log2_scale
from nanovllm.kernels.hopper.hopper_ring import barriers, buffers, gdc_launch_dependents, gdc_wait, sums_of, tiles_of
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms


class Shape(NamedTuple):
    packs: int  # per token
    pack: int  # query heads per pack
    group: int  # query heads that share a key-value head
    head_dim: int
    block_size: int
    tokens: int  # per tile of queries
    tile: int  # keys per tile, all in one block of the cache
    scale: float  # the factor of the scores times log2(e), for exp2
    window: int  # how many of the last keys a token sees; 0: all


@gluon.constexpr_function
def rows_of(head_dim):
    """Return a layout to load and store rows of `head_dim` elements as vectors of 16 bytes."""
    lanes = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def sums_by_thread():
    """Return a layout for [64, 4] tensors, with one value per thread and four threads per row."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def _load(ring, buffer, use, tiles, at):
    """Wait until `buffer` is free, then start to load a tile into it.

    `use` is the number of previous loads into `buffer`.

    Each buffer has two barriers. The barrier `full` completes when a tile is loaded. The barrier `empty` completes when
    the tile is no longer needed.
    """
    smem, full, empty = ring
    mbarrier.wait(empty.index(buffer), (use & 1) ^ 1)
    mbarrier.expect(full.index(buffer), tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, at, full.index(buffer), smem.index(buffer))


@gluon.jit
def _first_tile(position, SHAPE: gl.constexpr):
    """Return the first tile of keys that a query at `position` sees."""
    return gl.maximum(position + 1 - SHAPE.window, 0) // SHAPE.tile if SHAPE.window else 0


@gluon.jit
def _work(n, plan, SHAPE: gl.constexpr):
    """Return the n-th query tile of this program.

    The first field of the result is the index of the last key tile plus 1, or 0 if there is no n-th query tile. Query
    tiles are sorted by descending number of keys. The programs get the tiles in turn, in alternating order: from the
    first program to the last, then from the last to the first.
    """
    plan_ptrs, num_tiles, _ = plan
    tiles_ptr, starts_ptr, lengths_ptr, _ = plan_ptrs
    programs, program = gl.num_programs(0), gl.program_id(0)
    index = n * programs + gl.where(n % 2 == 0, program, programs - 1 - program)
    tile = gl.minimum(index // SHAPE.packs, num_tiles - 1)
    seq = gl.load(tiles_ptr + 2 * tile)
    first = gl.load(tiles_ptr + 2 * tile + 1)
    exists = (index < num_tiles * SHAPE.packs) & (seq >= 0)
    seq = gl.maximum(seq, 0)
    start = gl.load(starts_ptr + seq)
    num_new = gl.load(starts_ptr + seq + 1) - start
    length = gl.load(lengths_ptr + seq)
    position = length - num_new + first
    tokens = gl.minimum(num_new - first, SHAPE.tokens)
    count = gl.where(exists, (position + tokens + SHAPE.tile - 1) // SHAPE.tile, 0)
    return count, index % SHAPE.packs, start + first, tokens, position, length, seq


@gluon.jit
def _load_tiles(tiles, rings, plan, SHAPE: gl.constexpr):
    """Run the loading warp: load queries, then keys and values from the last tile to the first."""
    q_tiles, k_tiles, v_tiles = tiles
    queries, keys, values = rings
    plan_ptrs, _, table_stride = plan
    n, i = 0, 0
    work = _work(n, plan, SHAPE)
    while work[0] > 0:
        end, pack, row, _, position, _, seq = work
        count = end - _first_tile(position, SHAPE)
        table_ptr = plan_ptrs[3] + seq.to(gl.int64) * table_stride
        column = pack * SHAPE.pack // SHAPE.group * SHAPE.head_dim
        key = (end - 1) * SHAPE.tile
        block = gl.load(table_ptr + key // SHAPE.block_size)
        for w in gl.static_range(2):
            _load(queries, w, n, q_tiles, [row + w * (64 // SHAPE.pack), pack * SHAPE.pack, 0])
        for _ in range(count):
            slot = block * SHAPE.block_size + key % SHAPE.block_size
            key -= SHAPE.tile
            block = gl.load(table_ptr + gl.maximum(key, 0) // SHAPE.block_size)  # the block of the next tile
            _load(keys, i % 2, i // 2, k_tiles, [slot, column])
            _load(values, i % 2, i // 2, v_tiles, [slot, column])
            i += 1
        n += 1
        work = _work(n, plan, SHAPE)


@gluon.jit
def softmax(scores, state, position, key, MASKED: gl.constexpr, SHAPE: gl.constexpr):
    """Return the softmax weights, the factor by which the old sums are multiplied, and the new state.

    The state contains the maximum scaled score of each row. The state also contains a separate sum of weights for each
    thread, so threads need not exchange sums.
    """
    scale: gl.constexpr = SHAPE.scale
    m_i, l_i = state
    if MASKED:
        n = gl.arange(0, SHAPE.tile, gl.SliceLayout(0, scores.type.layout))
        # If a row sees no key of this tile, its weights are 1, and a later factor makes them 0. The score of a hidden
        # key is a power of two, so that multiplying it by the scale is exact. Otherwise, the fused multiply and
        # subtraction below could give any number.
        visible = (key + n)[None, :] <= position[:, None]
        if SHAPE.window:
            visible &= (key + n)[None, :] > position[:, None] - SHAPE.window
        scores = gl.where(visible, scores, -(2.0**100))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    p = gl.exp2(scores * scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    sums = gl.sum(gl.sum(gl.reshape(p, [64, SHAPE.tile // 8, 4, 2]), 3), 1)
    SUMS: gl.constexpr = sums_by_thread()
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + gl.convert_layout(sums, SUMS)
    return p, alpha, (m_new, l_i)


@gluon.jit
def _scores(q, keys, i, SHAPE: gl.constexpr):
    """Start to multiply the queries by the i-th tile of keys, which must already be loaded."""
    zeros = gl.full([64, SHAPE.tile], 0.0, gl.float32, sums_of(SHAPE.tile))
    k = keys[0].index(i % 2).permute((1, 0))
    return hopper.warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_values(acc, p, values, i, SHAPE: gl.constexpr):
    """Start to multiply the weights p by the i-th tile of values, and to add the product to `acc`.

    The caller passes both return values to `warpgroup_mma_wait`.
    """
    weights = gl.convert_layout(p.to(values[0].dtype), gl.DotOperandLayout(0, sums_of(SHAPE.head_dim), 2))
    mbarrier.wait(values[1].index(i % 2), i // 2 & 1)
    return hopper.warpgroup_mma(weights, values[0].index(i % 2), acc, is_async=True), weights


@gluon.jit
def _attend_tiles(sums, begin, end, args, W: gl.constexpr, MASKED: gl.constexpr, SHAPE: gl.constexpr):
    """Add the key tiles from `begin` to `end` to `sums`. Both indices count backwards from the last key tile."""
    q, position, rings, turns, counts = args
    _, keys, values = rings
    last, count, base = counts
    acc, p, state = sums
    for j in range(begin, end):
        i = base + j
        mbarrier.wait(turns.index(W), i & 1)
        scores = _scores(q, keys, i, SHAPE)
        acc, weights = _add_values(acc, p, values, i - 1, SHAPE)
        mbarrier.arrive(turns.index(1 - W), count=1)
        scores = hopper.warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys[2].index(i % 2), count=1)
        p, alpha, state = softmax(scores, state, position, (last - j) * SHAPE.tile, MASKED, SHAPE)
        # this wait keeps the compiler from moving softmax after the wait for the matmul
        mbarrier.wait(keys[1].index((i + 1) % 2), (i + 1) // 2 & 1, pred=j + 1 < count)
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(values[2].index((i - 1) % 2), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, sums_of(SHAPE.head_dim)))[:, None]
    return acc, p, state


@gluon.jit
def _forget_stale(v, key, length, SHAPE: gl.constexpr):
    """Set the values from position `length` on to zero, because 0 times a stale NaN is NaN.

    Both warpgroups may set the same values to zero.
    """
    ROWS: gl.constexpr = rows_of(SHAPE.head_dim)
    for part in gl.static_range(SHAPE.tile // 32):
        some = v.slice(part * 32, 32)
        n = key + part * 32 + gl.arange(0, 32, gl.SliceLayout(1, ROWS))
        some.store(gl.where((n < length)[:, None], some.load(ROWS), 0.0))
    hopper.fence_async_shared()


@gluon.jit
def _compute(out_ptr, rings, turns, plan, W: gl.constexpr, SHAPE: gl.constexpr):
    """Run one warpgroup: compute softmax(q k^T) v for 64 rows of each query tile."""
    queries, keys, values = rings
    SUMS: gl.constexpr = sums_of(SHAPE.head_dim)
    ROWS: gl.constexpr = rows_of(SHAPE.head_dim)
    FIRST: gl.constexpr = W * (64 // SHAPE.pack)
    row_of_scores: gl.constexpr = gl.SliceLayout(1, sums_of(SHAPE.tile))
    q = queries[0].index(W).reshape([64, SHAPE.head_dim])
    if W == 1:
        mbarrier.arrive(turns.index(0), count=1)
    n, i = 0, 0
    work = _work(n, plan, SHAPE)
    while work[0] > 0:
        end, pack, row, tokens, position, length, _ = work
        first = _first_tile(position, SHAPE)
        count = end - first
        key = (end - 1) * SHAPE.tile
        positions = position + FIRST + gl.arange(0, 64, row_of_scores) // SHAPE.pack
        mbarrier.wait(queries[1].index(W), n & 1)
        mbarrier.wait(keys[1].index(i % 2), i // 2 & 1)
        mbarrier.wait(turns.index(W), i & 1)
        scores = _scores(q, keys, i, SHAPE)
        mbarrier.arrive(turns.index(1 - W), count=1)
        if key + SHAPE.tile > length:
            mbarrier.wait(values[1].index(i % 2), i // 2 & 1)
            _forget_stale(values[0].index(i % 2), key, length, SHAPE)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys[2].index(i % 2), count=1)
        m_i, l_i = gl.full([64], -1e30, gl.float32, row_of_scores), gl.full([64, 4], 0.0, gl.float32, sums_by_thread())
        p, _, state = softmax(scores, (m_i, l_i), positions, key, True, SHAPE)
        mbarrier.wait(keys[1].index((i + 1) % 2), (i + 1) // 2 & 1, pred=count > 1)
        sums = gl.full([64, SHAPE.head_dim], 0.0, gl.float32, SUMS), p, state
        # tiles with keys hidden by causality, then tiles that all rows see, then tiles with keys hidden by the window
        cut = count - gl.minimum((position + FIRST + 1) // SHAPE.tile - first, count - 1)
        args = q, positions, rings, turns, (end - 1, count, i)
        if SHAPE.window:
            whole = _first_tile(position + FIRST + 64 // SHAPE.pack - 1 + SHAPE.tile - 1, SHAPE)
            window_cut = gl.maximum(count - gl.maximum(whole - first, 0), cut)
            sums = _attend_tiles(sums, 1, cut, args, W, True, SHAPE)
            sums = _attend_tiles(sums, cut, window_cut, args, W, False, SHAPE)
            sums = _attend_tiles(sums, window_cut, count, args, W, True, SHAPE)
        else:
            sums = _attend_tiles(sums, 1, cut, args, W, True, SHAPE)
            sums = _attend_tiles(sums, cut, count, args, W, False, SHAPE)
        mbarrier.arrive(queries[2].index(W), count=1)
        i += count
        n += 1
        work = _work(n, plan, SHAPE)
        acc, p, state = sums
        acc, weights = _add_values(acc, p, values, i - 1, SHAPE)
        l_i = gl.convert_layout(gl.sum(state[1], 1), gl.SliceLayout(1, SUMS))
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(values[2].index((i - 1) % 2), count=1)
        out = gl.convert_layout((acc * (1.0 / l_i)[:, None]).to(values[0].dtype), ROWS)
        r = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        token = FIRST + r // SHAPE.pack
        at = ((row + token).to(gl.int64) * SHAPE.packs + pack) * SHAPE.pack + r % SHAPE.pack
        d = gl.arange(0, SHAPE.head_dim, gl.SliceLayout(0, ROWS))
        gl.store(out_ptr + at[:, None] * SHAPE.head_dim + d[None, :], out, (token < tokens)[:, None])


@dependent_kernel()
@gluon.jit(do_not_specialize=["stride", "num_tiles"])
def _prefill_kernel(
    q_tiles, k_tiles, v_tiles, plan_ptrs, out_ptr, stride, num_tiles, SHAPE: gl.constexpr, PDL: gl.constexpr
):
    # A program loops over its tiles of queries (see _work).
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    queries = buffers(q_tiles, 2), barriers(2, 1), barriers(2, 1)
    keys = buffers(k_tiles, 2), barriers(2, 1), barriers(2, 2)
    values = buffers(v_tiles, 2), barriers(2, 1), barriers(2, 2)
    rings, turns = (queries, keys, values), barriers(2, 1)
    plan = plan_ptrs, num_tiles, stride
    gl.warp_specialize(
        [
            (_compute, (out_ptr, rings, turns, plan, gl.constexpr(0), SHAPE)),
            (_compute, (out_ptr, rings, turns, plan, gl.constexpr(1), SHAPE)),
            (_load_tiles, ((q_tiles, k_tiles, v_tiles), rings, plan, SHAPE)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers of their threads; the first has as many as the second
    )


def attend(tokens: int, tile: int, q: torch.Tensor, cache, plan_ptrs, out: torch.Tensor) -> None:
    """Compute `prefill_attention` of q [T, heads, head_dim]. Store the result in `out`, which has the shape of q.

    `plan_ptrs` is (query_tiles, cu_seqlens_q, context_lens, block_tables). A query tile has at most `tokens` tokens.
    `cache` has 16-bit keys and values, and neither a soft cap nor sinks. `tile` is the number of keys per tile: 64 or
    128, a divisor of the block size. `head_dim` is 64 or 128. If `tile` is 64, `head_dim` may also be 256.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = cache.k.shape[1:3]
    group = heads // kv_heads
    pack = group & -group
    window = cache.spec.window or 0
    shape = Shape(heads // pack, pack, group, head_dim, block_size, tokens, tile, log2_scale(cache), window)
    q_tiles = tiles_of(q, 64 // pack, pack, head_dim)
    tiles = (tiles_of(x.flatten(0, 1).flatten(1), tile, head_dim) for x in (cache.k, cache.v))
    num_tiles, stride = len(plan_ptrs[0]), plan_ptrs[3].stride(0)
    grid = (min(num_sms(q.device), num_tiles * shape.packs),)
    arguments = q_tiles, *tiles, plan_ptrs, out, stride, num_tiles
    launch(_prefill_kernel, grid, q.device)(*arguments, SHAPE=shape, num_warps=4)

"""The Hopper kernel for the second GEMM of moe_gemm.py, which follows the activation. x has 16 bits and many rows.

The kernel is written in Gluon. Two warpgroups multiply, one warp loads, two warps store, and one warp looks up tiles.

A tile has 128 rows of one expert and 256 outputs. Each warpgroup multiplies 64 rows. Multiplying a tile takes only 10
microseconds. In this time, other warps store the 64 KiB of results of the previous tile, and look up the next tile.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.hopper.hopper_ring import (
    barriers,
    buffers,
    gdc_launch_dependents,
    gdc_wait,
    halves,
    sums_of,
    tiles_of,
)
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.moe.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing

ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(256)
STEP = gl.constexpr(64)  # inputs per buffer, and outputs per stored piece; their rows have 128 bytes
GROUP = gl.constexpr(8)  # consecutive tiles of rows that use the same weights, which then stay in the L2 cache
STAGES = gl.constexpr(4)  # steps that are loaded ahead
SUMS = gl.constexpr(sums_of(256))
PIECE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))  # the layout [64, 64] of the warps that store


class Plan(NamedTuple):
    k: int
    top_k: int


@gluon.jit
def _put(fields, i: gl.constexpr, value):
    fields.index(i).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def _get(fields, i: gl.constexpr):
    return gl.sum(fields.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _look_up(table_ptr, num_tiles, num_blocks, lookup):
    """Run the warp that looks up the next tile, while the other warps work on the current tile."""
    fields, full, empty = lookup
    per_group = GROUP * num_blocks
    use = 0
    for index in range(gl.program_id(0), num_tiles * num_blocks, gl.num_programs(0)):
        first_tile = index // per_group * GROUP
        count = gl.minimum(num_tiles - first_tile, GROUP)
        field = table_ptr + (first_tile + index % per_group % count) * TILE_FIELDS
        expert, first_row, end_row = gl.load(field), gl.load(field + 1), gl.load(field + 2)
        if expert >= 0:
            mbarrier.wait(empty.index(0), (use & 1) ^ 1)
            _put(fields, 0, expert)
            _put(fields, 1, index % per_group // count)
            _put(fields, 2, first_row)
            _put(fields, 3, end_row)
            mbarrier.arrive(full.index(0), count=1)
            use += 1
    mbarrier.wait(empty.index(0), (use & 1) ^ 1)
    _put(fields, 0, -1)
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def _next_tile(lookup, use):
    """Return the next tile as (expert, block of outputs, first row, end row). After the last tile, `expert` is -1."""
    fields, full, empty = lookup
    mbarrier.wait(full.index(0), use & 1)
    expert, block = _get(fields, 0), _get(fields, 1)
    first_row, end_row = _get(fields, 2), _get(fields, 3)
    mbarrier.arrive(empty.index(0), count=1)
    return expert, block, first_row, end_row


@gluon.jit
def _load(x_tiles, w_tiles, num_blocks, lookup, rings, PLAN: gl.constexpr):
    """Run the loading warp, which uses one thread."""
    x_ring, w_ring, full, empty = rings
    i, use = 0, 0
    tile = _next_tile(lookup, use)
    while tile[0] >= 0:
        expert, block, first_row, _ = tile
        w_row = (expert * num_blocks + block) * COLUMNS
        for k in range(0, PLAN.k, STEP):
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, x_tiles.block_type.nbytes + w_tiles.block_type.nbytes)
            tma.async_copy_global_to_shared(x_tiles, [first_row, k], bar, x_ring.index(stage))
            tma.async_copy_global_to_shared(w_tiles, [w_row, k], bar, w_ring.index(stage))
            i += 1
        use += 1
        tile = _next_tile(lookup, use)


@gluon.jit
def _load_pairs(pairs_ptr, tile, rows):
    """Load the pair indices (see moe_routing.py) of a tile's `rows`.

    A row that does not exist gets the pair index 0.
    """
    expert, _, first_row, end_row = tile
    return gl.load(pairs_ptr + first_row + rows, (first_row + rows < end_row) & (expert >= 0), 0)


@gluon.jit
def _multiply(weights_ptr, pairs_ptr, lookup, rings, out, W: gl.constexpr, PLAN: gl.constexpr):
    """Run one warpgroup: multiply 64 rows of each tile, and scale the results by the rows' routing weights."""
    x_ring, w_ring, full, empty = rings
    out_ring, ready, free = out
    rows = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    i, use = 0, 0
    tile = _next_tile(lookup, use)
    pair = _load_pairs(pairs_ptr, tile, rows)
    while tile[0] >= 0:
        weight = gl.load(weights_ptr + pair)
        sums = gl.full([64, COLUMNS], 0.0, gl.float32, SUMS)
        for k in range((PLAN.k + STEP - 1) // STEP):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            x, w = x_ring.index(stage).slice(W * 64, 64), w_ring.index(stage).permute((1, 0))
            sums = hopper.warpgroup_mma(x, w, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=[sums])  # for the previous matmul
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=k > 0)
            i += 1
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1)
        tile = _next_tile(lookup, use + 1)
        pair = _load_pairs(pairs_ptr, tile, rows)
        left, right = halves(sums * weight[:, None])
        pieces = halves(left) + halves(right)
        for p in gl.static_range(4):
            buffer = W * 2 + p % 2
            mbarrier.wait(free.index(buffer), p // 2 ^ 1)  # a tile uses each buffer twice
            out_ring.index(buffer).store(pieces[p].to(out_ring.dtype))
            mbarrier.arrive(ready.index(buffer), count=1)
        use += 1


@gluon.jit
def _store(out_ptr, pairs_ptr, num_tokens, num_blocks, lookup, out, PLAN: gl.constexpr):
    """Run the warps that store the results of both warpgroups, piece by piece."""
    out_ring, ready, free = out
    width = num_blocks * COLUMNS
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, PIECE)), gl.arange(0, STEP, gl.SliceLayout(0, PIECE))
    use = 0
    tile = _next_tile(lookup, use)
    while tile[0] >= 0:
        _, block, first_row, end_row = tile
        pairs = _load_pairs(pairs_ptr, tile, rows), _load_pairs(pairs_ptr, tile, rows + 64)
        for p in gl.static_range(4):
            for w in gl.static_range(2):
                buffer = w * 2 + p % 2
                mbarrier.wait(ready.index(buffer), p // 2)
                piece = out_ring.index(buffer).load(PIECE)
                mbarrier.arrive(free.index(buffer), count=1)
                out_row = pairs[w] % PLAN.top_k * num_tokens + pairs[w] // PLAN.top_k
                at = out_ptr + out_row.to(gl.int64) * width + block * COLUMNS + p * STEP
                gl.store(at[:, None] + columns[None, :], piece, (first_row + rows + w * 64 < end_row)[:, None])
        use += 1
        tile = _next_tile(lookup, use)


@dependent_kernel()
@gluon.jit(do_not_specialize=["num_tiles", "num_tokens", "num_blocks"])
def _down_kernel(
    x_tiles, w_tiles, routing_ptrs, out_ptr, num_tiles, num_tokens, num_blocks, PLAN: gl.constexpr, PDL: gl.constexpr
):
    # A program loops over tiles of 128 rows and 256 outputs.
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    weights_ptr, pairs_ptr, table_ptr = routing_ptrs
    rings = buffers(x_tiles, STAGES), buffers(w_tiles, STAGES), barriers(STAGES, 1), barriers(STAGES, 2)
    out_ring = gl.allocate_shared_memory(x_tiles.dtype, [4, 64, STEP], x_tiles.layout)
    out = out_ring, barriers(4, 1), barriers(4, 1)
    fields = gl.allocate_shared_memory(gl.int32, [4, 1], mbarrier.MBarrierLayout())
    lookup = fields, barriers(1, 1), barriers(1, 4)
    gl.warp_specialize(
        [
            (_multiply, (weights_ptr, pairs_ptr, lookup, rings, out, gl.constexpr(0), PLAN)),
            (_multiply, (weights_ptr, pairs_ptr, lookup, rings, out, gl.constexpr(1), PLAN)),
            (_store, (out_ptr, pairs_ptr, num_tokens, num_blocks, lookup, out, PLAN)),
            (_load, (x_tiles, w_tiles, num_blocks, lookup, rings, PLAN)),
            (_look_up, (table_ptr, num_tiles, num_blocks, lookup)),
        ],
        [4, 2, 1, 1],  # warps of the second and later partitions
        [200, 104, 104, 104],  # registers of their threads; the first has as many as the second
    )


def experts_down(
    x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, routing: Routing, out: torch.Tensor
) -> torch.Tensor:
    """Multiply each row of x [rows, K] by its expert's weight, and scale the result by the row's routing weight.

    The results are stored in `out` [top_k, T, N]. `weight` is [experts, N, K], and N is a multiple of 256. The size of
    a row of x or `weight` is a multiple of 16 bytes. The tiles of `rows` have 128 rows.
    """
    (num_tokens, top_k), (n, k) = routing.weights.shape, weight.shape[1:]
    num_tiles, num_blocks = len(rows.table), n // COLUMNS.value
    x_tiles = tiles_of(x, ROWS.value, STEP.value)
    w_tiles = tiles_of(weight.flatten(0, 1), COLUMNS.value, STEP.value)
    routing_ptrs = routing.weights, rows.pairs, rows.table
    launch(_down_kernel, (min(num_sms(x.device), num_tiles * num_blocks),), x.device)(
        x_tiles, w_tiles, routing_ptrs, out, num_tiles, num_tokens, num_blocks, PLAN=Plan(k, top_k), num_warps=4
    )
    return out

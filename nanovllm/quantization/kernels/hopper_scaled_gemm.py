"""Computes y = x W^T in FP8, for 17 to 256 rows of x. The kernel is written in Gluon for Hopper.

In x, each group of 128 inputs in a row has a scale. In W, each 128 x 128 block has a scale. One warpgroup loads tiles,
and one or two warpgroups multiply them. The sum over 128 inputs is scaled, and then added to float32 accumulators, as
in hopper_product.py. The loading warpgroup also multiplies the scales of x by the scales of W. The multiplying
warpgroups have no free registers, because the largest tiles have 256 x 192 accumulators.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.hopper.hopper_ring import barriers, buffers, gdc_launch_dependents, gdc_wait, sums_of, tiles_of
from nanovllm.kernels.hopper.hopper_tiles import HopperTile
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.kernels.linear.tiles import QuantizedRows

BLOCK = gl.constexpr(128)  # the size of groups and blocks that share a scale, and the number of inputs per buffer
WIDTH = gl.constexpr(64)  # rows and outputs of one tensor core matmul
SUMS = gl.constexpr(sums_of(64, 8))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OUTPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # stores of 16 bytes
LOADING_REGISTERS = gl.constexpr(24)  # registers of a thread that loads
SHARED_BYTES = 226 * 2**10  # of all buffers, and of 8 KiB for the stores of each warpgroup


class Plan(NamedTuple):
    groups: int  # warpgroups that multiply, each with its own rows
    parts: int  # of 64 rows, per multiplying warpgroup
    chunks: int  # of 64 outputs, per tile
    split_k: int
    k_blocks: int  # blocks of 128 inputs of the whole matmul
    blocks: int  # blocks of 128 inputs of a split
    stages: int  # blocks that are loaded ahead
    burst: int  # blocks that are loaded together, because memory is faster with longer pieces of a row
    registers: int  # per thread that multiplies


@gluon.constexpr_function
def _boxes(PLAN):
    return PLAN.groups * PLAN.parts


@gluon.constexpr_function
def _early(PLAN):
    """Return how many blocks of weights a program loads before it waits for the previous kernel."""
    return min(PLAN.stages, PLAN.blocks) // PLAN.burst * PLAN.burst


@gluon.constexpr_function
def _least(a, b):
    return min(a, b)


@gluon.jit
def _place(tile, sizes, PLAN: gl.constexpr):
    """Return (first row, first output, first block, split) of a tile. Tiles with the same weights are consecutive."""
    _, _, row_tiles, _ = sizes
    split = tile // row_tiles % PLAN.split_k
    n = tile // row_tiles // PLAN.split_k * (PLAN.chunks * WIDTH)
    return tile % row_tiles * (_boxes(PLAN) * WIDTH), n, split * PLAN.blocks, split


@gluon.jit
def _load_weights(w_tiles, rings, i, n, block, X_ROWS: gl.constexpr, PLAN: gl.constexpr):
    """Load the weights of the next PLAN.burst blocks, which begin with the i-th block."""
    _, w_ring, _, full, empty = rings
    BURST: gl.constexpr = PLAN.burst
    CHUNKS: gl.constexpr = PLAN.chunks
    for j in gl.static_range(BURST):
        stage = (i + j) % PLAN.stages
        mbarrier.wait(empty.index(stage), ((i + j) // PLAN.stages & 1) ^ 1)
        mbarrier.expect(full.index(stage), (_boxes(PLAN) * X_ROWS + CHUNKS * WIDTH) * BLOCK)
    for chunk in gl.static_range(CHUNKS):
        for j in gl.static_range(BURST):
            stage = (i + j) % PLAN.stages
            at = [n + chunk * WIDTH, (block + j) * BLOCK]
            tma.async_copy_global_to_shared(w_tiles, at, full.index(stage), w_ring.index(stage * CHUNKS + chunk))


@gluon.jit
def _load_scales(scale_ptrs, row, n, block, sizes, PLAN: gl.constexpr):
    """Load the scales of the tile's rows and of the tile's two weight blocks, for a block of inputs."""
    x_ptr, w_ptr, stride = scale_ptrs
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = gl.minimum(block, PLAN.k_blocks - 1)
    rows = row + gl.arange(0, _boxes(PLAN) * WIDTH, LAYOUT)
    x = gl.load(x_ptr + block * stride + gl.minimum(rows, sizes[0] - 1))
    second = gl.minimum(n // BLOCK + 1, sizes[1] // BLOCK - 1)
    return x, gl.load(w_ptr + n // BLOCK * PLAN.k_blocks + block), gl.load(w_ptr + second * PLAN.k_blocks + block)


@gluon.jit
def _load(tiles, scale_ptrs, rings, sizes, PLAN: gl.constexpr):
    """Run the loading warpgroup."""
    x_tiles, w_tiles = tiles
    x_ring, scale_ring, full = rings[0], rings[2], rings[3]
    ROWS: gl.constexpr = x_tiles.block_shape[0]
    BOXES: gl.constexpr = _boxes(PLAN)
    BURST: gl.constexpr = PLAN.burst
    i = 0
    for tile in range(gl.program_id(0), sizes[3], gl.num_programs(0)):
        row, n, first, _ = _place(tile, sizes, PLAN)
        next_scales = _load_scales(scale_ptrs, row, n, first, sizes, PLAN)
        for block in range(first, first + PLAN.blocks, BURST):
            if i >= _early(PLAN):
                _load_weights(w_tiles, rings, i, n, block, ROWS, PLAN)
            for j in gl.static_range(BURST):
                stage = (i + j) % PLAN.stages
                for box in gl.static_range(BOXES):
                    x = x_ring.index(stage * BOXES + box).slice(0, ROWS)
                    at = [row + box * WIDTH, (block + j) * BLOCK]
                    tma.async_copy_global_to_shared(x_tiles, at, full.index(stage), x)
                x_scales, first_scale, second_scale = next_scales
                next_scales = _load_scales(scale_ptrs, row, n, block + j + 1, sizes, PLAN)
                scale_ring.index(stage * 2).store(x_scales * first_scale)
                scale_ring.index(stage * 2 + 1).store(x_scales * second_scale)
                mbarrier.arrive(full.index(stage), count=1)
            i += BURST


@gluon.jit
def _add_block(sums, rings, stage, phase, n, G: gl.constexpr, PLAN: gl.constexpr):
    """Multiply a block of inputs by the weights, and add the result to the accumulators."""
    x_ring, w_ring, scale_ring, full, empty = rings
    PARTS: gl.constexpr = PLAN.parts
    CHUNKS: gl.constexpr = PLAN.chunks
    COUNT: gl.constexpr = PARTS * CHUNKS
    AHEAD: gl.constexpr = _least(2 - PARTS, COUNT - 1)
    STEPS: gl.constexpr = COUNT + AHEAD
    mbarrier.wait(full.index(stage), phase)
    xs, scales, products, added = (), (), (), ()
    for part in gl.static_range(PARTS):
        x = x_ring.index(stage * _boxes(PLAN) + G * PARTS + part)
        if PARTS == 1:
            x = x.load(gl.DotOperandLayout(0, SUMS, 4))
        xs = xs + (x,)  # noqa: RUF005 (Gluon has no star)
    for i in gl.static_range(STEPS):
        if i < COUNT:
            of_weights = scale_ring.index(stage * 2 + (n + i % CHUNKS * WIDTH) // BLOCK - n // BLOCK)
            of_part = of_weights.slice((G * PARTS + i // CHUNKS) * WIDTH, WIDTH)
            scales = scales + (of_part.load(gl.SliceLayout(1, SUMS)),)  # noqa: RUF005
            zeros = gl.full([WIDTH, WIDTH], 0.0, gl.float32, SUMS)
            w = w_ring.index(stage * CHUNKS + i % CHUNKS).permute((1, 0))
            y = hopper.warpgroup_mma(xs[i // CHUNKS], w, zeros, use_acc=False, is_async=True)
            products = products + (y,)  # noqa: RUF005
        if i >= AHEAD:
            y = hopper.warpgroup_mma_wait(_least(AHEAD, STEPS - 1 - i), deps=[products[i - AHEAD]])
            if i == STEPS - 1:
                mbarrier.arrive(empty.index(stage), count=1)
            y = sums[i - AHEAD] + y * scales[i - AHEAD][:, None]
            # this wait keeps the compiler from moving the addition after the next matmul, which would need more
            # registers
            y = hopper.warpgroup_mma_wait(_least(AHEAD, STEPS - 1 - i), deps=[y])
            added = added + (y,)  # noqa: RUF005
    return added


@gluon.jit
def _store(out_ptr, sums, row, n, sizes):
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), OUTPUTS)
    rows = row + gl.arange(0, WIDTH, gl.SliceLayout(1, OUTPUTS))
    columns = n + gl.arange(0, WIDTH, gl.SliceLayout(0, OUTPUTS))
    exists = (rows < sizes[0])[:, None] & (columns < sizes[1])[None, :]
    gl.store(out_ptr + rows[:, None] * sizes[1] + columns[None, :], out, exists)


@gluon.jit
def _multiply(out_ptr, rings, sizes, G: gl.constexpr, PLAN: gl.constexpr):
    """Run a multiplying warpgroup. In each tile, the warpgroup multiplies its own rows by all weights of the tile."""
    zeros = gl.full([WIDTH, WIDTH], 0.0, gl.float32, SUMS)
    COUNT: gl.constexpr = PLAN.parts * PLAN.chunks
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), sizes[3], gl.num_programs(0)):
        row, n, _, split = _place(tile, sizes, PLAN)
        sums = (zeros,) * COUNT
        for _k in range(PLAN.blocks):
            sums = _add_block(sums, rings, stage, phase, n, G, PLAN)
            stage += 1
            if stage == PLAN.stages:
                stage = 0
                phase ^= 1
        part_ptr = out_ptr + split * sizes[0] * sizes[1]
        for i in gl.static_range(COUNT):
            first_row = row + (G * PLAN.parts + i // PLAN.chunks) * WIDTH
            _store(part_ptr, sums[i], first_row, n + i % PLAN.chunks * WIDTH, sizes)


@dependent_kernel(early=("w_tiles",))
@gluon.jit(do_not_specialize=["num_rows", "row_tiles", "num_tiles"])
def _gemm_kernel(
    x_tiles, w_tiles, out_ptr, scale_ptrs, num_rows, n, row_tiles, num_tiles, PLAN: gl.constexpr, PDL: gl.constexpr
):
    # A program loops over tiles, starting with the tile that has the program's index.
    gdc_launch_dependents(PDL)
    STAGES: gl.constexpr = PLAN.stages
    EARLY: gl.constexpr = _early(PLAN)
    BURST: gl.constexpr = PLAN.burst
    X_SHAPE: gl.constexpr = [STAGES * _boxes(PLAN), WIDTH, BLOCK]
    SCALES_SHAPE: gl.constexpr = [STAGES * 2, _boxes(PLAN) * WIDTH]
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, X_SHAPE, x_tiles.layout)
    w_ring = buffers(w_tiles, STAGES * PLAN.chunks)
    scale_ring = gl.allocate_shared_memory(gl.float32, SCALES_SHAPE, SCALES)
    rings = x_ring, w_ring, scale_ring, barriers(STAGES, 2), barriers(STAGES, PLAN.groups)
    sizes = num_rows, n, row_tiles, num_tiles
    _, first_n, first, _ = _place(gl.program_id(0), sizes, PLAN)
    for i in gl.static_range(0, EARLY, BURST):
        _load_weights(w_tiles, rings, i, first_n, first + i, x_tiles.block_shape[0], PLAN)
    gdc_wait(PDL)
    tiles = x_tiles, w_tiles
    if PLAN.groups == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, rings, sizes, gl.constexpr(0), PLAN)),
                (_load, (tiles, scale_ptrs, rings, sizes, PLAN)),
            ],
            [4],  # warps of the second partition
            [LOADING_REGISTERS],  # registers of its threads
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, rings, sizes, gl.constexpr(0), PLAN)),
                (_multiply, (out_ptr, rings, sizes, gl.constexpr(1), PLAN)),
                (_load, (tiles, scale_ptrs, rings, sizes, PLAN)),
            ],
            [4, 4],
            [PLAN.registers, LOADING_REGISTERS],
        )


def _plan(tile: HopperTile, k: int) -> Plan:
    boxes, groups, k_blocks = tile.rows // 64, min(tile.rows // 64, 2), k // 128
    stage_bytes = (tile.rows + tile.outputs) * 128 + 2 * 4 * tile.rows
    stages = min(tile.stages, (SHARED_BYTES - groups * 2**13) // stage_bytes) // tile.burst * tile.burst
    blocks = triton.cdiv(k_blocks, tile.split_k * tile.burst) * tile.burst
    registers = (tile.registers * (groups + 1) - LOADING_REGISTERS.value) // groups // 8 * 8
    return Plan(
        *(groups, boxes // groups, tile.outputs // 64, tile.split_k, k_blocks, blocks, stages, tile.burst, registers)
    )


def hopper_scaled_gemm(
    x: QuantizedRows, values: torch.Tensor, scales: torch.Tensor, tile: HopperTile, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `split_k_gemm`, which returns [split_k, M, N].

    x [M, K] and the weight [N, K] consist of 8-bit values with scales.
    """
    m, (n, k) = len(x), values.shape
    out = torch.empty((tile.split_k, m, n), dtype=x.dtype, device=values.device) if out is None else out
    x_tiles, w_tiles = tiles_of(x.values, 32 if m <= 32 else 64, 128), tiles_of(values, 64, 128)
    row_tiles = triton.cdiv(m, tile.rows)
    num_tiles = row_tiles * tile.split_k * triton.cdiv(n, tile.outputs)
    launch(_gemm_kernel, (min(num_sms(values.device), num_tiles),), values.device)(
        *(x_tiles, w_tiles, out, (x.scales, scales, x.scales.stride(1)), m, n, row_tiles, num_tiles),
        PLAN=_plan(tile, k),
        num_warps=4,
        maxnreg=tile.registers,
    )
    return out

"""A GEMM and its epilogue in one kernel for Hopper, written in Gluon.

Either the operands have 16 bits, or they are `QuantizedRows` and an FP8 weight with one scale per 128 x 128 block. One
warp loads tiles, and two warpgroups multiply them. A tile has 128 rows (64 for each warpgroup) and two blocks of 128
outputs.

The epilogue is a function in another file. The epilogue's arguments include the accumulators of a warpgroup: one tensor
[64, 256] for 16-bit operands, or four quarters [64, 64] for FP8.

In FP8, tensor cores accumulate imprecisely, so each of their sums covers only 128 inputs. A warpgroup multiplies the
sums of the tensor cores by scales, and adds the products in float32. While a warpgroup adds the sums of 64 outputs, the
tensor cores compute the next 64 outputs.
"""

from typing import NamedTuple

import torch
import triton
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
from nanovllm.kernels.linear.tiles import QuantizedRows

BLOCK = gl.constexpr(128)  # the size of all blocks and groups that share a scale
SUMS = gl.constexpr(sums_of(64, 8))  # the layout of a quarter of the accumulators


class Plan(NamedTuple):
    k: int
    step: int  # inputs per buffer; a row of them has 128 bytes
    adjacent: bool  # the two blocks of a tile are adjacent; otherwise one is in each half of the outputs
    stages: int = 4  # steps that are loaded ahead
    group: int = 16  # consecutive tiles of rows that use the same weights, which then stay in the L2 cache


@gluon.jit
def _tile(index, sizes, PLAN: gl.constexpr):
    """Return the first row of a tile, and the index of the tile's pair of output blocks."""
    num_rows, num_pairs, _ = sizes
    per_group = PLAN.group * num_pairs
    first = index // per_group * PLAN.group
    count = gl.minimum((num_rows + BLOCK - 1) // BLOCK - first, PLAN.group)
    return (first + index % per_group % count) * BLOCK, index % per_group // count


@gluon.jit
def _block(n, j, sizes, PLAN: gl.constexpr):
    """Return the index of block `j` (0 or 1) of the n-th pair of output blocks."""
    return 2 * n + j if PLAN.adjacent else n + j * sizes[1]


@gluon.jit
def _load_tiles(tiles, rings, sizes, PLAN: gl.constexpr):
    """Run the loading warp: load rows for both warpgroups, and the weights of both blocks."""
    x_tiles, w_tiles = tiles
    x_ring, w_ring, full, empty = rings
    i = 0
    for index in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        row, n = _tile(index, sizes, PLAN)
        for k in range(0, PLAN.k, PLAN.step):
            stage = i % PLAN.stages
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // PLAN.stages & 1) ^ 1)
            mbarrier.expect(bar, 2 * x_tiles.block_type.nbytes + 2 * w_tiles.block_type.nbytes)
            for j in gl.static_range(2):
                tma.async_copy_global_to_shared(x_tiles, [row + j * 64, k], bar, x_ring.index(stage * 2 + j))
                w_row = _block(n, j, sizes, PLAN) * BLOCK
                tma.async_copy_global_to_shared(w_tiles, [w_row, k], bar, w_ring.index(stage * 2 + j))
            i += 1


@gluon.jit
def _load_scales(scale_ptrs, tile, k, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """Load the scales of this warpgroup's rows and of both weight blocks, for the k-th block of inputs."""
    x_ptr, w_ptr, stride = scale_ptrs
    row, n = tile
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    x = gl.load(x_ptr + k * stride + gl.minimum(rows, sizes[0] - 1))
    # The addresses of the weights' scales are the same for all threads, but the compiler must not know this. Otherwise,
    # it would move the scales to uniform registers, and wait for the loads immediately.
    at = w_ptr + k + gl.minimum(rows, 0)
    blocks = PLAN.k // BLOCK
    return x, gl.load(at + _block(n, 0, sizes, PLAN) * blocks), gl.load(at + _block(n, 1, sizes, PLAN) * blocks)


@gluon.jit
def _product(x, w, half: gl.constexpr):
    """Start to multiply rows x [64, 128], which are in registers, by one half of a weight block w [128, 128]."""
    zeros = gl.full([64, 64], 0.0, gl.float32, SUMS)
    return hopper.warpgroup_mma(x, w.slice(half * 64, 64).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, product, scale, RUNNING: gl.constexpr):
    """Add `product` times `scale` to `acc`, and wait until at most RUNNING matmuls are in progress.

    Without the wait, the compiler would postpone the addition, and would need more registers.
    """
    return hopper.warpgroup_mma_wait(RUNNING, deps=[acc + product * scale[:, None]])


@gluon.jit
def _add_block(sums, stage, use, scales, rings, W: gl.constexpr):
    """Multiply a block of inputs by the weights, and add the scaled results to `sums`."""
    x_ring, w_ring, full, empty = rings
    a0, a1, b0, b1 = sums
    a_scale, b_scale = scales
    mbarrier.wait(full.index(stage), use & 1)
    x = x_ring.index(stage * 2 + W).load(gl.DotOperandLayout(0, SUMS, 4))
    a, b = w_ring.index(stage * 2), w_ring.index(stage * 2 + 1)
    first, second = _product(x, a, 0), _product(x, a, 1)
    first = hopper.warpgroup_mma_wait(1, deps=[first])
    a0 = _add(a0, first, a_scale, 1)
    first = _product(x, b, 0)
    second = hopper.warpgroup_mma_wait(1, deps=[second])
    a1 = _add(a1, second, a_scale, 1)
    second = _product(x, b, 1)
    first = hopper.warpgroup_mma_wait(1, deps=[first])
    b0 = _add(b0, first, b_scale, 1)
    second = hopper.warpgroup_mma_wait(0, deps=[second])
    mbarrier.arrive(empty.index(stage), count=1)
    return a0, a1, b0, _add(b1, second, b_scale, 0)


@gluon.jit
def quarters_of(sums):
    """Return the accumulators `sums` as four quarters, each [64, 64]."""
    if isinstance(sums, gl.tensor):
        a, b = halves(sums)
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        sums = _as_sums(a0), _as_sums(a1), _as_sums(b0), _as_sums(b1)
    return sums


@gluon.jit
def _as_sums(x):
    return gl.convert_layout(x, SUMS, assert_trivial=True)


@gluon.jit
def _compute(out, rings, sizes, W: gl.constexpr, EPILOGUE: gl.constexpr, PLAN: gl.constexpr):
    """Run one warpgroup: multiply 16-bit operands and call the epilogue for each tile."""
    x_ring, w_ring, full, empty = rings
    w_ring = w_ring._reinterpret(w_ring.dtype, [PLAN.stages, 2 * BLOCK, PLAN.step], w_ring.layout)  # both blocks
    i = 0
    for index in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        row, n = _tile(index, sizes, PLAN)
        sums = gl.full([64, 2 * BLOCK], 0.0, gl.float32, sums_of(2 * BLOCK))
        for k in range((PLAN.k + PLAN.step - 1) // PLAN.step):
            stage = i % PLAN.stages
            mbarrier.wait(full.index(stage), i // PLAN.stages & 1)
            w = w_ring.index(stage).permute((1, 0))
            sums = hopper.warpgroup_mma(x_ring.index(stage * 2 + W), w, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=[sums])  # for the previous matmul
            mbarrier.arrive(empty.index((i + PLAN.stages - 1) % PLAN.stages), count=1, pred=k > 0)
            i += 1
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((i + PLAN.stages - 1) % PLAN.stages), count=1)
        EPILOGUE(sums, out, row + W * 64, n, sizes[0], W)
    tma.store_wait(0)


@gluon.jit
def _compute_scaled(out, scale_ptrs, rings, sizes, W: gl.constexpr, EPILOGUE: gl.constexpr, PLAN: gl.constexpr):
    """Run one warpgroup: multiply FP8 operands and call the epilogue for each tile."""
    zeros = gl.full([64, 64], 0.0, gl.float32, SUMS)
    stage, use = 0, 0
    index = gl.program_id(0)
    tile = _tile(index, sizes, PLAN)
    next_scales = _load_scales(scale_ptrs, tile, 0, sizes, W, PLAN)
    while index < sizes[2]:
        sums = zeros, zeros, zeros, zeros
        for k in range(PLAN.k // BLOCK):
            x_scale, a_scale, b_scale = next_scales
            block_scales = x_scale * a_scale, x_scale * b_scale
            next_scales = _load_scales(scale_ptrs, tile, gl.minimum(k + 1, PLAN.k // BLOCK - 1), sizes, W, PLAN)
            sums = _add_block(sums, stage, use, block_scales, rings, W)
            stage += 1
            if stage == PLAN.stages:
                stage = 0
                use += 1
        row, n = tile
        index += gl.num_programs(0)
        tile = _tile(gl.minimum(index, sizes[2] - 1), sizes, PLAN)  # there are no scales after the last tile
        next_scales = _load_scales(scale_ptrs, tile, 0, sizes, W, PLAN)
        EPILOGUE(sums, out, row + W * 64, n, sizes[0], W)
    tma.store_wait(0)


@gluon.jit
def _compute_either(out, scale_ptrs, rings, sizes, W: gl.constexpr, EPILOGUE: gl.constexpr, PLAN: gl.constexpr):
    if scale_ptrs is None:
        _compute(out, rings, sizes, W, EPILOGUE, PLAN)
    else:
        _compute_scaled(out, scale_ptrs, rings, sizes, W, EPILOGUE, PLAN)


@gluon.jit
def store_tile(y, smem, tiles, at, RUNNING: gl.constexpr):
    """Store tile y through the buffer `smem`. Up to RUNNING earlier stores may be in progress."""
    tma.store_wait(RUNNING)
    smem.store(y.to(smem.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, smem)


@dependent_kernel()
@gluon.jit(do_not_specialize=["num_rows", "num_pairs"])
def _product_kernel(
    x_tiles,
    w_tiles,
    out_tiles,
    scale_ptrs,
    out_ptrs,
    num_rows,
    num_pairs,
    EPILOGUE: gl.constexpr,
    PLAN: gl.constexpr,
    PDL: gl.constexpr,
):
    # A program loops over tiles of 128 rows and 256 outputs.
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    STAGES: gl.constexpr = PLAN.stages
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    rings = buffers(x_tiles, 2 * STAGES), buffers(w_tiles, 2 * STAGES), full, empty
    sizes = num_rows, num_pairs, (num_rows + BLOCK - 1) // BLOCK * num_pairs
    out = out_ptrs if out_tiles is None else (out_tiles, buffers(out_tiles, 256 // out_tiles.block_shape[1]), out_ptrs)
    gl.warp_specialize(
        [
            (_compute_either, (out, scale_ptrs, rings, sizes, gl.constexpr(0), EPILOGUE, PLAN)),
            (_compute_either, (out, scale_ptrs, rings, sizes, gl.constexpr(1), EPILOGUE, PLAN)),
            (_load_tiles, ((x_tiles, w_tiles), rings, sizes, PLAN)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers of their threads; the first has as many as the second
    )


def product(x: torch.Tensor | QuantizedRows, weight, scales: torch.Tensor | None, epilogue, out_ptrs, y=None) -> None:
    """Compute x W^T for x [T, K] and W [N, K]. Pass the accumulators and `out_ptrs` to the epilogue.

    If `scales` are given, x and W are in FP8. Without `scales`, x and W have 16 bits. N is a multiple of 256. Without
    `y`, a tile has two adjacent blocks of outputs. If `y` is given, a tile has one block from each half of the outputs,
    and the epilogue stores tiles of `y`.
    """
    (n, k), step = weight.shape, 128 // weight.element_size()
    rows, scale_ptrs = (x, None) if scales is None else (x.values, (x.scales, scales, x.scales.stride(1)))
    num_pairs = n // 256
    grid = (min(num_sms(weight.device), triton.cdiv(len(x), 128) * num_pairs),)
    y_tiles = None if y is None else tiles_of(y, 64, 128 if scales is None else 64)
    tiles = tiles_of(rows, 64, step), tiles_of(weight, 128, step), y_tiles
    constants = dict(EPILOGUE=epilogue, PLAN=Plan(k, step, y is None), num_warps=4)
    launch(_product_kernel, grid, weight.device)(*tiles, scale_ptrs, out_ptrs, len(x), num_pairs, **constants)

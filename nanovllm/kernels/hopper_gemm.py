"""Products of quantized rows with weights in FP8, both with scales of blocks of 128, for Hopper: one warp loads, two
warpgroups multiply. Written in Gluon, which changes with Triton's version.

A tile has 128 rows, 64 for each warpgroup, and two halves of 128 outputs: consecutive ones or, if gated, outputs of
gate and those of up. The tensor cores add up 128 inputs with few bits; their sums times the scales are added up in
float32. While one warpgroup does that, the tensor cores work for the other.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.dependent_launch import dependent_kernel, launch, num_sms
from nanovllm.kernels.hopper_prefill import gdc_launch_dependents, gdc_wait
from nanovllm.kernels.tiles import QuantizedRows

TILE = gl.constexpr(128)  # inputs, and outputs of half a tile


class Plan(NamedTuple):
    """Constants of the kernel."""

    k: int
    gated: bool
    stages: int = 4
    group_m: int = 16


@gluon.constexpr_function
def _sums():
    """The layout of a warpgroup's sums of products [64, 64], as wgmma has them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])


@gluon.jit
def _tile(index, sizes, PLAN: gl.constexpr):
    """The first row of the index-th tile, and its number along the outputs: some tiles of rows share weights in L2."""
    num_m, num_n = sizes
    per_group = PLAN.group_m * num_n
    first = index // per_group * PLAN.group_m
    size = gl.minimum(num_m - first, PLAN.group_m)
    within = index % per_group
    return (first + within % size) * 128, within // size


@gluon.jit
def _first_output(n, half, num_n, PLAN: gl.constexpr):
    return (half * num_n + n if PLAN.gated else n * 2 + half) * TILE


@gluon.jit
def _load_tiles(tiles, rings, sizes, PLAN: gl.constexpr):
    """The warp that loads, with one thread."""
    x_tiles, w_tiles = tiles
    x_ring, w_ring, full, empty = rings
    num_m, num_n = sizes
    i = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        row, n = _tile(index, sizes, PLAN)
        for k in range(0, PLAN.k, TILE):
            stage = i % PLAN.stages
            mbarrier.wait(empty.index(stage), (i // PLAN.stages & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * x_tiles.block_type.nbytes + 2 * w_tiles.block_type.nbytes)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(x_tiles, [row + 64 * half, k], bar, x_ring.index(stage * 2 + half))
                at = [_first_output(n, half, num_n, PLAN), k]
                tma.async_copy_global_to_shared(w_tiles, at, bar, w_ring.index(stage * 2 + half))
            i += 1


@gluon.jit
def _scales(scale_ptrs, tile, block, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """Of the rows and of both halves' weights, for the block of inputs."""
    x_ptr, w_ptr, stride, num_rows, num_blocks = scale_ptrs
    row, n = tile
    _, num_n = sizes
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, _sums()))
    x = gl.load(x_ptr + block.to(gl.int64) * stride + gl.minimum(rows, num_rows - 1))
    # all threads load the same, from addresses that the compiler takes for different ones: else it would wait at once
    # for the scale, to have it in a uniform register
    w = w_ptr + block + gl.minimum(rows, 0)
    w0 = gl.load(w + gl.minimum(_first_output(n, 0, num_n, PLAN) // TILE, num_blocks - 1) * (PLAN.k // TILE))
    w1 = gl.load(w + gl.minimum(_first_output(n, 1, num_n, PLAN) // TILE, num_blocks - 1) * (PLAN.k // TILE))
    return x, w0, w1


@gluon.jit
def _product(x, w, part: gl.constexpr):
    """Start the product of rows [64, 128], in registers, with a part of the weights, 64 outputs."""
    zeros = gl.full([64, 64], 0.0, gl.float32, _sums())
    return hopper.warpgroup_mma(x, w.slice(part * 64, 64).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, part, scale, RUNNING: gl.constexpr):
    """The wait keeps the compiler from moving the addition behind the next product, which would take more registers."""
    return hopper.warpgroup_mma_wait(RUNNING, deps=[acc + part * scale[:, None]])


@gluon.jit
def _add_products(sums, stage, use, scale0, scale1, rings, W: gl.constexpr, PLAN: gl.constexpr):
    """Two of four products run at a time: when one is done, the tensor cores begin the next while it is added."""
    x_ring, w_ring, full, empty = rings
    a, b, c, d = sums
    w0 = w_ring.index(stage * 2)
    w1 = w_ring.index(stage * 2 + 1)
    mbarrier.wait(full.index(stage), use & 1)
    x = x_ring.index(stage * 2 + W).load(gl.DotOperandLayout(0, _sums(), 4))
    p = _product(x, w0, 0)
    q = _product(x, w0, 1)
    p = hopper.warpgroup_mma_wait(1, deps=[p])
    a = _add(a, p, scale0, 1)
    p = _product(x, w1, 0)
    q = hopper.warpgroup_mma_wait(1, deps=[q])
    b = _add(b, q, scale0, 1)
    q = _product(x, w1, 1)
    p = hopper.warpgroup_mma_wait(1, deps=[p])
    c = _add(c, p, scale1, 1)
    q = hopper.warpgroup_mma_wait(0, deps=[q])
    mbarrier.arrive(empty.index(stage), count=1)
    return a, b, c, _add(d, q, scale1, 0)


@gluon.jit
def _silu(x):
    """By two approximate instructions, each right to 2^-22: division and `gl.exp` take several times as many."""
    asm: gl.constexpr = """
    {
        .reg .f32 y;
        mul.f32 y, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 y, y;
        add.f32 y, y, 0f3F800000;
        rcp.approx.ftz.f32 y, y;
        mul.f32 $0, $1, y;
    }
    """
    return gl.inline_asm_elementwise(asm, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store(y, smem, tiles, at):
    tma.store_wait(1)
    smem.store(y.to(smem.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, smem)


@gluon.jit
def _multiply(out, scale_ptrs, rings, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """A warpgroup."""
    out_tiles, out_scale_ptr, out_ring = out
    num_m, num_n = sizes
    use = 0
    stage = 0
    index = gl.program_id(0)
    tile = _tile(index, sizes, PLAN)
    scales = _scales(scale_ptrs, tile, index * 0, sizes, W, PLAN)
    zeros = gl.full([64, 64], 0.0, gl.float32, _sums())
    while index < num_m * num_n:
        row, n = tile
        sums = zeros, zeros, zeros, zeros
        for block in range(PLAN.k // TILE):
            x_scale, w_scale0, w_scale1 = scales
            scale0, scale1 = x_scale * w_scale0, x_scale * w_scale1
            scales = _scales(scale_ptrs, tile, gl.minimum(block + 1, PLAN.k // TILE - 1), sizes, W, PLAN)
            sums = _add_products(sums, stage, use, scale0, scale1, rings, W, PLAN)
            stage += 1
            if stage == PLAN.stages:
                stage = 0
                use += 1
        index += gl.num_programs(0)
        tile = _tile(index, sizes, PLAN)
        scales = _scales(scale_ptrs, tile, index * 0, sizes, W, PLAN)
        a, b, c, d = sums
        row += W * 64
        if PLAN.gated:
            a = _silu(a) * c
            b = _silu(b) * d
            largest = gl.maximum(gl.max(gl.abs(a), 1), gl.max(gl.abs(b), 1))
            largest = gl.maximum(largest, 1e-12)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, _sums()))
            gl.store(out_scale_ptr + n.to(gl.int64) * scale_ptrs[2] + rows, largest / 448.0, rows < scale_ptrs[3])
            inverse = (448.0 / largest)[:, None]
            _store(a * inverse, out_ring.index(W * 2), out_tiles, [row, n * 128])
            _store(b * inverse, out_ring.index(W * 2 + 1), out_tiles, [row, n * 128 + 64])
        else:
            _store(a, out_ring.index(W * 2), out_tiles, [row, n * 256])
            _store(b, out_ring.index(W * 2 + 1), out_tiles, [row, n * 256 + 64])
            _store(c, out_ring.index(W * 2), out_tiles, [row, n * 256 + 128])
            _store(d, out_ring.index(W * 2 + 1), out_tiles, [row, n * 256 + 192])
    tma.store_wait(0)


@dependent_kernel()
@gluon.jit(do_not_specialize=["scale_stride", "num_rows", "num_blocks", "num_n"])
def _gemm_kernel(
    x_tiles,
    w_tiles,
    out_tiles,
    scale_ptrs,
    out_scale_ptr,
    scale_stride,
    num_rows,
    num_blocks,
    num_n,
    PLAN: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    STAGES: gl.constexpr = PLAN.stages
    X: gl.constexpr = [2 * PLAN.stages] + x_tiles.block_shape  # noqa: RUF005 (Gluon has no star)
    WEIGHTS: gl.constexpr = [2 * PLAN.stages] + w_tiles.block_shape  # noqa: RUF005
    OUT: gl.constexpr = [4] + out_tiles.block_shape  # noqa: RUF005
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, X, x_tiles.layout)
    w_ring = gl.allocate_shared_memory(w_tiles.dtype, WEIGHTS, w_tiles.layout)
    out_ring = gl.allocate_shared_memory(out_tiles.dtype, OUT, out_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    x_scale_ptr, w_scale_ptr = scale_ptrs
    out = out_tiles, out_scale_ptr, out_ring
    scales = x_scale_ptr, w_scale_ptr, scale_stride, num_rows, num_blocks
    rings = x_ring, w_ring, full, empty
    sizes = (num_rows + 127) // 128, num_n
    gl.warp_specialize(
        [
            (_multiply, (out, scales, rings, sizes, gl.constexpr(0), PLAN)),
            (_multiply, (out, scales, rings, sizes, gl.constexpr(1), PLAN)),
            (_load_tiles, ((x_tiles, w_tiles), rings, sizes, PLAN)),
        ],
        [4, 1],  # warps of all but the first
        [240, 24],  # registers of their threads; the first has as many as the second
    )


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    size = x.element_size()
    layout = gl.NVMMASharedLayout(min(128, columns * size), 8 * size)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def multiply(
    x: QuantizedRows,
    values: torch.Tensor,
    scales: torch.Tensor,
    gated: bool,
    out: torch.Tensor | None = None,
    **options,
) -> torch.Tensor | QuantizedRows:
    """As `scaled_gemm.hopper_gemm`, for any number of rows."""
    rows, (n, k) = len(x.values), values.shape
    if gated:
        y = torch.empty((rows, n // 2), dtype=values.dtype, device=values.device)
        y_scales = torch.empty((n // 256, rows), dtype=torch.float32, device=values.device).t()
        product = QuantizedRows(y, y_scales, len(x), x.dtype)
    else:
        y, y_scales = torch.empty((len(x), n), dtype=x.dtype, device=values.device) if out is None else out[0], None
        product = y
    num_n = triton.cdiv(n, 256)
    grid = (min(num_sms(values.device), triton.cdiv(rows, 128) * num_n),)
    launch(_gemm_kernel, grid, values.device)(
        *(_tiles(x.values, 64, 128), _tiles(values, 128, 128), _tiles(y, 64, 64), (x.scales, scales), y_scales),
        *(x.scales.stride(1), rows, n // 128, num_n),
        PLAN=Plan(k, gated, **options),
        num_warps=4,
    )
    return product

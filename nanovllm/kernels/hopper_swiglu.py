"""A product and SwiGLU in one kernel for Hopper: in 16 bits, or of quantized rows and weights in FP8 with a scale for
128 x 128 of them, whose results are quantized too. One warp loads, two warpgroups compute. Written in Gluon, which
changes with Triton's version.

A tile has 128 rows, 64 for each warpgroup, and 128 outputs of gate with the same of up. In 16 bits gate, up and silu
are rounded as by separate kernels, which takes no longer: the results are the same, but for 0 instead of some 1e-36.

In FP8 a tile has all that shares a scale afterwards. The tensor cores add up the products of 128 inputs, with few
digits; these sums times their scales are added up in float32. They are computed for 64 outputs at a time, so that the
tensor cores begin with the next 64 while a warpgroup does that.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.devices import num_sms
from nanovllm.kernels.hopper_ring import barriers, buffers, gdc_launch_dependents, gdc_wait, sums_of
from nanovllm.kernels.tiles import QuantizedRows

BLOCK = gl.constexpr(128)  # weights, in both directions, inputs and outputs that share a scale
SUMS = gl.constexpr(sums_of(64, 8))


class Plan(NamedTuple):
    """Constants of the kernel."""

    k: int
    step: int  # inputs of a buffer, whose rows have 128 bytes
    stages: int = 4  # steps that are loaded ahead
    group: int = 16  # tiles of rows that take the same weights one after the other, which are then in the L2 cache


@gluon.jit
def _tile(index, sizes, PLAN: gl.constexpr):
    """The first row of a tile, and its block of outputs."""
    num_rows, num_blocks, _ = sizes
    per_group = PLAN.group * num_blocks
    first = index // per_group * PLAN.group
    count = gl.minimum((num_rows + BLOCK - 1) // BLOCK - first, PLAN.group)
    return (first + index % per_group % count) * BLOCK, index % per_group // count


@gluon.jit
def _load_tiles(tiles, rings, sizes, PLAN: gl.constexpr):
    """The warp that loads, with one thread: rows for both warpgroups, and weights of gate and up."""
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
                w_row = (j * sizes[1] + n) * BLOCK
                tma.async_copy_global_to_shared(w_tiles, [w_row, k], bar, w_ring.index(stage * 2 + j))
            i += 1


@gluon.jit
def _load_scales(scales, tile, k, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """For the k-th block of inputs: of this warpgroup's rows, of gate and of up."""
    x_ptr, w_ptr, stride = scales
    row, n = tile
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    x = gl.load(x_ptr + k * stride + gl.minimum(rows, sizes[0] - 1))
    # Each thread loads the weights' scales, from addresses that the compiler takes for different ones: if it knew that
    # all are the same, it would move them to uniform registers, and wait for them at once.
    at = w_ptr + k + gl.minimum(rows, 0)
    return x, gl.load(at + n * (PLAN.k // BLOCK)), gl.load(at + (sizes[1] + n) * (PLAN.k // BLOCK))


@gluon.jit
def _product(x, w, half: gl.constexpr):
    """Start the product of rows [64, 128], which are in registers, with half a block of weights [128, 128]."""
    zeros = gl.full([64, 64], 0.0, gl.float32, SUMS)
    return hopper.warpgroup_mma(x, w.slice(half * 64, 64).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, product, scale, RUNNING: gl.constexpr):
    """The wait keeps the compiler from moving the addition behind the next product, which would take more registers."""
    return hopper.warpgroup_mma_wait(RUNNING, deps=[acc + product * scale[:, None]])


@gluon.jit
def _add_block(sums, stage, use, scales, rings, W: gl.constexpr):
    """Add the products of a block of inputs to the sums, two halves of gate and two of up. Two products run at once."""
    x_ring, w_ring, full, empty = rings
    gate0, gate1, up0, up1 = sums
    gate_scale, up_scale = scales
    mbarrier.wait(full.index(stage), use & 1)
    x = x_ring.index(stage * 2 + W).load(gl.DotOperandLayout(0, SUMS, 4))
    gate, up = w_ring.index(stage * 2), w_ring.index(stage * 2 + 1)
    first, second = _product(x, gate, 0), _product(x, gate, 1)
    first = hopper.warpgroup_mma_wait(1, deps=[first])
    gate0 = _add(gate0, first, gate_scale, 1)
    first = _product(x, up, 0)
    second = hopper.warpgroup_mma_wait(1, deps=[second])
    gate1 = _add(gate1, second, gate_scale, 1)
    second = _product(x, up, 1)
    first = hopper.warpgroup_mma_wait(1, deps=[first])
    up0 = _add(up0, first, up_scale, 1)
    second = hopper.warpgroup_mma_wait(0, deps=[second])
    mbarrier.arrive(empty.index(stage), count=1)
    return gate0, gate1, up0, _add(up1, second, up_scale, 0)


@gluon.constexpr_function
def _silu_of(x, y):
    """By two approximate instructions, each right to 2^-22: division and `gl.exp` take several times as many."""
    return f"""
        mul.f32 y, {x}, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 y, y;
        add.f32 y, y, 0f3F800000;  // 1
        rcp.approx.ftz.f32 y, y;
        mul.f32 {y}, {x}, y;
    """


@gluon.constexpr_function
def _swiglu_of(dtype):
    """Of two values of gate and two of up, which are rounded to 16 bits in pairs; the compiler would do it singly."""
    half = "bf16" if dtype == gl.bfloat16 else "f16"
    return f"""
    {{
        .reg .b32 gate, up;
        .reg .b16 low, high;
        .reg .f32 y, first, second;
        cvt.rn.{half}x2.f32 gate, $2, $1;
        cvt.rn.{half}x2.f32 up, $4, $3;
        mov.b32 {{low, high}}, gate;
        cvt.f32.{half} first, low;
        cvt.f32.{half} second, high;
        {_silu_of("first", "first")}
        {_silu_of("second", "second")}
        cvt.rn.{half}x2.f32 gate, second, first;
        mul.rn.{half}x2 $0, gate, up;
    }}
    """


@gluon.jit
def _silu(x):
    asm: gl.constexpr = "{ .reg .f32 y; " + _silu_of("$1", "$0") + " }"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store(y, smem, tiles, at, RUNNING: gl.constexpr):
    """So many stores may still run: they read other buffers."""
    tma.store_wait(RUNNING)
    smem.store(y.to(smem.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, smem)


@gluon.jit
def _compute(out, rings, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """A warpgroup, in 16 bits."""
    out_tiles, out_ring = out
    x_ring, w_ring, full, empty = rings
    w_ring = w_ring._reinterpret(w_ring.dtype, [PLAN.stages, 2 * BLOCK, PLAN.step], w_ring.layout)  # gate and up
    i = 0
    for index in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        row, n = _tile(index, sizes, PLAN)
        sums = gl.full([64, 2 * BLOCK], 0.0, gl.float32, sums_of(2 * BLOCK))
        for k in range((PLAN.k + PLAN.step - 1) // PLAN.step):
            stage = i % PLAN.stages
            mbarrier.wait(full.index(stage), i // PLAN.stages & 1)
            w = w_ring.index(stage).permute((1, 0))
            sums = hopper.warpgroup_mma(x_ring.index(stage * 2 + W), w, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=[sums])  # for the one before
            mbarrier.arrive(empty.index((i + PLAN.stages - 1) % PLAN.stages), count=1, pred=k > 0)
            i += 1
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((i + PLAN.stages - 1) % PLAN.stages), count=1)
        gate, up = gl.reshape(sums, [64, 2, BLOCK]).permute((0, 2, 1)).split()
        asm: gl.constexpr = _swiglu_of(out_tiles.dtype)
        y = gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [gate, up], out_tiles.dtype, is_pure=True, pack=2)
        _store(y, out_ring.index(W), out_tiles, [row + W * 64, n * BLOCK], 0)
    tma.store_wait(0)


@gluon.jit
def _compute_scaled(out, scale_ptrs, rings, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    """A warpgroup, in FP8. Scales are loaded a block ahead; of a tile, before the tile before it is stored."""
    out_tiles, out_ring = out
    x_scale_ptr, w_scale_ptr, out_scale_ptr = scale_ptrs
    scales = x_scale_ptr, w_scale_ptr, sizes[0]
    zeros = gl.full([64, 64], 0.0, gl.float32, SUMS)
    stage, use = 0, 0
    index = gl.program_id(0)
    tile = _tile(index, sizes, PLAN)
    next_scales = _load_scales(scales, tile, 0, sizes, W, PLAN)
    while index < sizes[2]:
        sums = zeros, zeros, zeros, zeros
        for k in range(PLAN.k // BLOCK):
            x_scale, gate_scale, up_scale = next_scales
            block_scales = x_scale * gate_scale, x_scale * up_scale
            next_scales = _load_scales(scales, tile, gl.minimum(k + 1, PLAN.k // BLOCK - 1), sizes, W, PLAN)
            sums = _add_block(sums, stage, use, block_scales, rings, W)
            stage += 1
            if stage == PLAN.stages:
                stage = 0
                use += 1
        row, n = tile
        index += gl.num_programs(0)
        tile = _tile(gl.minimum(index, sizes[2] - 1), sizes, PLAN)  # there are no scales behind the last
        next_scales = _load_scales(scales, tile, 0, sizes, W, PLAN)
        gate0, gate1, up0, up1 = sums
        y0 = _silu(gate0) * up0
        y1 = _silu(gate1) * up1
        largest = gl.maximum(gl.maximum(gl.max(gl.abs(y0), 1), gl.max(gl.abs(y1), 1)), 1e-12)  # as in `scale_of`
        row += W * 64
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        gl.store(out_scale_ptr + n.to(gl.int64) * sizes[0] + rows, largest / 448.0, rows < sizes[0])
        inverse = (448.0 / largest)[:, None]
        _store(y0 * inverse, out_ring.index(W * 2), out_tiles, [row, n * BLOCK], 1)
        _store(y1 * inverse, out_ring.index(W * 2 + 1), out_tiles, [row, n * BLOCK + 64], 1)
    tma.store_wait(0)


@gluon.jit
def _compute_either(out, scale_ptrs, rings, sizes, W: gl.constexpr, PLAN: gl.constexpr):
    if scale_ptrs is None:
        _compute(out, rings, sizes, W, PLAN)
    else:
        _compute_scaled(out, scale_ptrs, rings, sizes, W, PLAN)


@dependent_kernel()
@gluon.jit(do_not_specialize=["num_rows", "num_blocks"])
def _swiglu_kernel(
    x_tiles, w_tiles, out_tiles, scale_ptrs, num_rows, num_blocks, PLAN: gl.constexpr, PDL: gl.constexpr
):
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    STAGES: gl.constexpr = PLAN.stages
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    rings = buffers(x_tiles, 2 * STAGES), buffers(w_tiles, 2 * STAGES), full, empty
    sizes = num_rows, num_blocks, (num_rows + BLOCK - 1) // BLOCK * num_blocks
    out = out_tiles, buffers(out_tiles, 4 * 64 // out_tiles.block_shape[1])
    gl.warp_specialize(
        [
            (_compute_either, (out, scale_ptrs, rings, sizes, gl.constexpr(0), PLAN)),
            (_compute_either, (out, scale_ptrs, rings, sizes, gl.constexpr(1), PLAN)),
            (_load_tiles, ((x_tiles, w_tiles), rings, sizes, PLAN)),
        ],
        [4, 1],  # warps of all but the first
        [240, 24],  # registers of their threads; the first has as many as the second
    )


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    bits = 8 * x.element_size()
    return TensorDescriptor.from_tensor(x, [rows, columns], gl.NVMMASharedLayout(min(128, columns * bits // 8), bits))


def swiglu(
    x: torch.Tensor | QuantizedRows, weight: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor | QuantizedRows:
    """`silu_and_mul` of x W^T in 16 bits or, with scales, what `scaled_linear.swiglu_quantize` computes; any rows."""
    (n, k), step = weight.shape, 128 // weight.element_size()
    rows = x if scales is None else x.values
    num_rows, num_blocks = len(rows), n // 256
    y = torch.empty((num_rows, n // 2), dtype=weight.dtype, device=weight.device)
    scale_ptrs = None
    if scales is not None:
        y_scales = torch.empty((num_blocks, num_rows), dtype=torch.float32, device=weight.device).t()
        scale_ptrs = x.scales, scales, y_scales
    grid = (min(num_sms(weight.device), triton.cdiv(num_rows, 128) * num_blocks),)
    launch(_swiglu_kernel, grid, weight.device)(
        *(_tiles(rows, 64, step), _tiles(weight, 128, step), _tiles(y, 64, 128 if scales is None else 64), scale_ptrs),
        *(num_rows, num_blocks),
        PLAN=Plan(k, step),
        num_warps=4,
    )
    return y if scales is None else QuantizedRows(y, y_scales, len(x), x.dtype)

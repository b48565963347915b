"""A Hopper epilogue for hopper_product.py: SwiGLU in 16 bits, or in FP8 with quantized results.

In 16 bits, gate, up and silu(gate) are each rounded, at no extra cost. So the results equal the results of separate
kernels, except that values near 1e-36 become 0. In FP8, all results that share a scale are in the same tile.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.hopper.hopper_product import BLOCK, SUMS, product, store_tile
from nanovllm.kernels.hopper.hopper_ring import halves
from nanovllm.kernels.linear.tiles import QuantizedRows


@gluon.constexpr_function
def _silu_of(x, y):
    """Return PTX code for y = silu(x).

    The code uses two approximate instructions, each with an error of at most 2^-22. Division and `gl.exp` would take
    several times as many instructions.
    """
    return f"""
        mul.f32 y, {x}, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 y, y;
        add.f32 y, y, 0f3F800000;  // 1
        rcp.approx.ftz.f32 y, y;
        mul.f32 {y}, {x}, y;
    """


@gluon.constexpr_function
def _swiglu_of(dtype):
    """Return PTX code for two SwiGLU results that one instruction rounds."""
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
def _store_swiglu(sums, out, row, n, num_rows, W: gl.constexpr):
    """Run the 16-bit epilogue."""
    out_tiles, out_ring, _ = out
    gate, up = halves(sums)
    asm: gl.constexpr = _swiglu_of(out_tiles.dtype)
    y = gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [gate, up], out_tiles.dtype, is_pure=True, pack=2)
    store_tile(y, out_ring.index(W), out_tiles, [row, n * BLOCK], 0)


@gluon.jit
def _store_quantized(quarters, out, row, n, num_rows, W: gl.constexpr):
    """Run the FP8 epilogue: quantize the results, with one scale per 128 results of a row."""
    out_tiles, out_ring, scale_ptrs = out
    scale_ptr, stride = scale_ptrs
    gate0, gate1, up0, up1 = quarters
    y0 = _silu(gate0) * up0
    y1 = _silu(gate1) * up1
    largest = gl.maximum(gl.maximum(gl.max(gl.abs(y0), 1), gl.max(gl.abs(y1), 1)), 1e-12)  # as in `scale_of`
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    gl.store(scale_ptr + n.to(gl.int64) * stride + rows, largest / 448.0, rows < num_rows)
    inverse = (448.0 / largest)[:, None]
    store_tile(y0 * inverse, out_ring.index(W * 2), out_tiles, [row, n * BLOCK], 1)
    store_tile(y1 * inverse, out_ring.index(W * 2 + 1), out_tiles, [row, n * BLOCK + 64], 1)


def swiglu(
    x: torch.Tensor | QuantizedRows, weight: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor | QuantizedRows:
    """Return `silu_and_mul` of x W^T, [T, N / 2], for x [T, K] and weight [N, K] in 16 bits.

    With `scales`, x is quantized, the weight is in FP8, and the result is the same as `swiglu_quantize` in
    multiply_scaled.py.
    """
    num_rows, n = len(x if scales is None else x.values), len(weight) // 2
    y = torch.empty((num_rows, n), dtype=weight.dtype, device=weight.device)
    if scales is None:
        product(x, weight, None, _store_swiglu, None, y)
        return y
    y_scales = torch.empty((n // 128, num_rows), dtype=torch.float32, device=weight.device).t()
    product(x, weight, scales, _store_quantized, (y_scales, num_rows), y)
    return QuantizedRows(y, y_scales, len(x), x.dtype)

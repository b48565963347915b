"""A Hopper epilogue for hopper_product.py: a gated activation in 16 bits, or SwiGLU in FP8 with quantized results.

In 16 bits, `gate`, `up` and the activation of `gate` are rounded separately, at no extra cost. The fused kernel
therefore returns the same results as separate kernels, except that activations of `gate` below about 1e-36 become 0. In
FP8, all results that share a scale are in one tile.
"""

from math import e, log2
from struct import pack

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.activations import GELU_AND_MUL, SWIGLU, Activation
from nanovllm.kernels.hopper.hopper_product import BLOCK, SUMS, product, store_tile
from nanovllm.kernels.hopper.hopper_ring import halves
from nanovllm.kernels.linear.tiles import QuantizedRows


def _gate_code(x: str, y: str, act: Activation) -> str:
    """Return PTX code that computes y = x * sigmoid(alpha * (x + cubic * x^3)) (see Activation).

    The code uses two approximate instructions, each with an error of at most 2^-22. Exact division and `gl.exp` would
    need several times as many instructions.
    """

    def number(value: float) -> str:
        return "0f" + pack(">f", value).hex()

    factor = -act.alpha * log2(e)
    lines = [f"mul.f32 y, {x}, {number(factor)};"]
    if act.cubic:
        lines = [f"mul.f32 y, {x}, {x};", f"fma.rn.f32 y, y, {number(factor * act.cubic)}, {number(factor)};"]
        lines += [f"mul.f32 y, y, {x};"]
    lines += ["ex2.approx.ftz.f32 y, y;", f"add.f32 y, y, {number(1.0)};", "rcp.approx.ftz.f32 y, y;"]
    return "\n".join([*lines, f"mul.f32 {y}, {x}, y;"])


def _results_code(half: str, act: Activation) -> str:
    """Return PTX code for two results of a gated activation. A single instruction rounds both results."""
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
        {_gate_code("first", "first", act)}
        {_gate_code("second", "second", act)}
        cvt.rn.{half}x2.f32 gate, second, first;
        mul.rn.{half}x2 $0, gate, up;
    }}
    """


_SILU = gl.constexpr("{ .reg .f32 y; " + _gate_code("$1", "$0", SWIGLU) + " }")
# for bfloat16, and for float16
_SWIGLU_PAIR = gl.constexpr((_results_code("bf16", SWIGLU), _results_code("f16", SWIGLU)))
_GELU_PAIR = gl.constexpr((_results_code("bf16", GELU_AND_MUL), _results_code("f16", GELU_AND_MUL)))


@gluon.jit
def _silu(x):
    return gl.inline_asm_elementwise(_SILU, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store_gated(sums, out, row, n, W: gl.constexpr, CODES: gl.constexpr):
    """Run a 16-bit epilogue: compute the gated activation, and store the results."""
    out_tiles, out_ring, _ = out
    gate, up = halves(sums)
    asm: gl.constexpr = CODES[0] if out_tiles.dtype == gl.bfloat16 else CODES[1]
    y = gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [gate, up], out_tiles.dtype, is_pure=True, pack=2)
    store_tile(y, out_ring.index(W), out_tiles, [row, n * BLOCK], 0)


@gluon.jit
def _store_swiglu(sums, out, row, n, num_rows, W: gl.constexpr):
    _store_gated(sums, out, row, n, W, _SWIGLU_PAIR)


@gluon.jit
def _store_gelu(sums, out, row, n, num_rows, W: gl.constexpr):
    _store_gated(sums, out, row, n, W, _GELU_PAIR)


@gluon.jit
def _store_quantized(quarters, out, row, n, num_rows, W: gl.constexpr):
    """Run the FP8 epilogue: compute SwiGLU, and quantize the results. Each row has one scale per 128 results."""
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


EPILOGUES = {SWIGLU: _store_swiglu, GELU_AND_MUL: _store_gelu}


def gated_linear(
    x: torch.Tensor | QuantizedRows, weight: torch.Tensor, act: Activation, scales: torch.Tensor | None = None
) -> torch.Tensor | QuantizedRows:
    """Multiply x [T, K] by the weight [N, K], and apply the gated activation. Return a tensor [T, N / 2].

    Without `scales`, all tensors have 16 bits. If `scales` are given, x and the weight are in FP8, and the activation
    is SwiGLU. In FP8, the result equals that of `swiglu_quantize` in multiply_scaled.py.
    """
    num_rows, n = len(x if scales is None else x.values), len(weight) // 2
    y = torch.empty((num_rows, n), dtype=weight.dtype, device=weight.device)
    if scales is None:
        product(x, weight, None, EPILOGUES[act], None, y)
        return y
    y_scales = torch.empty((n // 128, num_rows), dtype=torch.float32, device=weight.device).t()
    product(x, weight, scales, _store_quantized, (y_scales, num_rows), y)
    return QuantizedRows(y, y_scales, len(x), x.dtype)

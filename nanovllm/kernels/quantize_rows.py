"""Activations to e4m3 for products of several rows: alone, or in the pass of the norm or activation that makes them.

A group of inputs of a row shares a scale: 128 of them for weights in blocks, else all.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.fp8 import encode_e4m3
from nanovllm.kernels.tiles import QuantizedRows, as_loadable, scale_of

ROW_MULTIPLE = 16  # the library's products want numbers of rows that it divides
SLOW_ROWS = range(129, 256)  # take the library as long as 256 rows, or longer


class Groups(NamedTuple):
    """How the inputs of a row are divided: `size` of `n` share a scale. The rest are powers of two."""

    n: int
    size: int
    count: int  # groups of a program
    width: int  # at least `size`


@triton.jit
def _positions(first_group, GROUPS: tl.constexpr):
    """Where the elements of groups [count, width] are in a row, and whether they are elements of it."""
    col = tl.arange(0, GROUPS.width)[None, :]
    at = (first_group + tl.arange(0, GROUPS.count))[:, None] * GROUPS.size + col
    return at, (at < GROUPS.n) & (col < GROUPS.size)


@triton.jit
def _store_groups(x, out_ptrs, row, first_group, stride, GROUPS: tl.constexpr):
    """Quantize and store the groups [count, width] of a row from first_group on. x is 0 beyond them and the row."""
    out_ptr, scale_ptr = out_ptrs
    group = first_group + tl.arange(0, GROUPS.count)
    scale, inverse = scale_of(tl.max(tl.abs(x), 1))
    at, inside = _positions(first_group, GROUPS)
    tl.store(out_ptr + row * GROUPS.n + at, encode_e4m3(x * inverse[:, None], out_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + group.to(tl.int64) * stride + row, scale, group * GROUPS.size < GROUPS.n)


@dependent_kernel()
@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(x_ptr, out_ptrs, scale_stride, GROUPS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):
    """Quantize some groups of a row; if GATED, those of the activation of a row of 2 n elements."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS.count
    at, inside = _positions(first_group, GROUPS)
    if GATED:
        gate = tl.load(x_ptr + row * 2 * GROUPS.n + at, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * GROUPS.n + GROUPS.n + at, inside, 0.0)
        x = ((gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * GROUPS.n + at, inside, 0.0).to(tl.float32)
    _store_groups(x, out_ptrs, row, first_group, scale_stride, GROUPS)


@dependent_kernel(early=("weight_ptr",))
@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rms_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptrs,
    num_rows,
    eps,
    scale_stride,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm of layernorm.py, with a row as groups."""
    gdc_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    col, inside = _positions(0, GROUPS)
    at = row * GROUPS.n + col
    weight = tl.load(weight_ptr + col, inside, 0.0).to(tl.float32)
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        x += tl.load(x_ptr + (part * num_rows + row) * GROUPS.n + col, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        total = (x + tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, inside)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / GROUPS.n + eps) * weight
    _store_groups(x, out_ptrs, row, 0, scale_stride, GROUPS)


def _empty(num_rows: int, n: int, group: int, like: torch.Tensor) -> QuantizedRows:
    rows = triton.cdiv(num_rows, ROW_MULTIPLE) * ROW_MULTIPLE if num_rows not in SLOW_ROWS else SLOW_ROWS.stop
    values = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=like.device)
    scales = torch.empty((n // group, rows), dtype=torch.float32, device=like.device).t()
    return QuantizedRows(values, scales, num_rows, like.dtype)


def _operands(rows: QuantizedRows) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    return (as_loadable(rows.values), rows.scales), rows.scales.stride(1)


def _quantize(x: torch.Tensor, n: int, group: int, gated: bool) -> QuantizedRows:
    rows = _empty(len(x), n, group, x)
    if len(x):
        width, num_groups = triton.next_power_of_2(group), n // group
        count = min(triton.next_power_of_2(num_groups), max(1, 2048 // width))
        grid, num_warps = (len(x), triton.cdiv(num_groups, count)), 4 if count * width <= 2048 else 8
        constants = dict(GROUPS=Groups(n, group, count, width), GATED=gated, num_warps=num_warps)
        launch(_quantize_kernel, grid, x.device)(x, *_operands(rows), **constants)
    return rows


def quantize_rows(x: torch.Tensor, group: int) -> QuantizedRows:
    """x [T, K], contiguous, to e4m3 with a scale for each `group` of inputs, which divides K."""
    return _quantize(x, x.shape[1], group, gated=False)


def silu_and_mul_quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """`quantize_rows` of `silu_and_mul`: x [T, 2n], contiguous -> [T, n]."""
    return _quantize(x, x.shape[1] // 2, group, gated=True)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, split_k: int, group: int
) -> QuantizedRows:
    """`quantize_rows` of `rms_norm`, with its other arguments."""
    num_rows, n = x.shape[-2:]
    rows = _empty(num_rows, n, group, x)
    if num_rows:
        width, count = triton.next_power_of_2(group), triton.next_power_of_2(n // group)
        constants = dict(GROUPS=Groups(n, group, count, width), num_warps=4 if count * width <= 2048 else 8)
        outputs, stride = _operands(rows)
        launch(_rms_norm_quantize_kernel, (num_rows,), x.device)(
            x, residual, weight, outputs, num_rows, eps, stride, SPLIT_K=split_k, **constants
        )
    return rows

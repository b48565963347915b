"""Activations to e4m3 for products of several rows: alone, or in the pass of the norm or activation that makes them.

A group of inputs of a row shares a scale: 128 of them for weights in blocks, else all.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.fp8 import encode_e4m3
from nanovllm.kernels.tiles import QuantizedRows, as_loadable, scale_of

ROW_MULTIPLE = 16  # the library's products want numbers of rows that it divides
SLOW_ROWS = range(129, 256)  # take the library as long as 256 rows, or longer


@triton.jit
def _store_groups(x, out_ptr, scale_ptr, row, first_group, stride, N: tl.constexpr, GROUP: tl.constexpr):
    """Quantize and store the groups [groups, width] of a row from first_group on; GROUP of N inputs share a scale.

    The width is a power of two; x is 0 beyond GROUP and beyond the row.
    """
    group = first_group + tl.arange(0, x.shape[0])
    col = tl.arange(0, x.shape[1])
    scale, inverse = scale_of(tl.max(tl.abs(x), 1))
    at = group[:, None] * GROUP + col[None, :]
    y = encode_e4m3(x * inverse[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + at, y, (at < N) & (col < GROUP)[None, :])
    tl.store(scale_ptr + group.to(tl.int64) * stride + row, scale, group * GROUP < N)


@dependent_kernel()
@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    scale_stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize GROUPS groups of a row; if GATED, those of the activation of a row of 2 N elements."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS
    col = tl.arange(0, WIDTH)
    at = (first_group + tl.arange(0, GROUPS))[:, None] * GROUP + col[None, :]
    inside = (at < N) & (col < GROUP)[None, :]
    if GATED:
        gate = tl.load(x_ptr + row * 2 * N + at, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * N + N + at, inside, 0.0)
        x = ((gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * N + at, inside, 0.0).to(tl.float32)
    _store_groups(x, out_ptr, scale_ptr, row, first_group, scale_stride, N, GROUP)


@dependent_kernel(early=("weight_ptr",))
@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rms_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    num_rows,
    eps,
    scale_stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm of layernorm.py, with a row as GROUPS groups."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, WIDTH)
    col = tl.arange(0, GROUPS)[:, None] * GROUP + width[None, :]
    inside = (col < N) & (width < GROUP)[None, :]
    at = row * N + col
    weight = tl.load(weight_ptr + col, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        x += tl.load(x_ptr + (part * num_rows + row) * N + col, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, inside)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / N + eps) * weight
    _store_groups(x, out_ptr, scale_ptr, row, 0, scale_stride, N, GROUP)


def _empty(num_rows: int, n: int, group: int, like: torch.Tensor) -> QuantizedRows:
    rows = triton.cdiv(num_rows, ROW_MULTIPLE) * ROW_MULTIPLE if num_rows not in SLOW_ROWS else SLOW_ROWS.stop
    values = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=like.device)
    scales = torch.empty((n // group, rows), dtype=torch.float32, device=like.device).t()
    return QuantizedRows(values, scales, num_rows, like.dtype)


def _quantize(x: torch.Tensor, n: int, group: int, gated: bool) -> QuantizedRows:
    rows = _empty(len(x), n, group, x)
    if len(x):
        width, num_groups = triton.next_power_of_2(group), n // group
        groups = min(triton.next_power_of_2(num_groups), max(1, 2048 // width))
        launch(_quantize_kernel, (len(x), triton.cdiv(num_groups, groups)), x.device)(
            x,
            as_loadable(rows.values),
            rows.scales,
            rows.scales.stride(1),
            N=n,
            GROUP=group,
            GROUPS=groups,
            WIDTH=width,
            GATED=gated,
            num_warps=4 if groups * width <= 2048 else 8,
        )
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
        width, groups = triton.next_power_of_2(group), triton.next_power_of_2(n // group)
        launch(_rms_norm_quantize_kernel, (num_rows,), x.device)(
            x,
            residual,
            weight,
            as_loadable(rows.values),
            rows.scales,
            num_rows,
            eps,
            rows.scales.stride(1),
            N=n,
            GROUP=group,
            GROUPS=groups,
            WIDTH=width,
            SPLIT_K=split_k,
            HAS_RESIDUAL=residual is not None,
            num_warps=4 if groups * width <= 2048 else 8,
        )
    return rows

"""Quantizes the inputs of GEMMs to e4m3. The kernel of the preceding norm or activation can also quantize the inputs.

Each group of inputs in a row has one scale. A group is 128 inputs if the weights have block scales, otherwise the whole
row. If there is no tensor for scales, the functions in this file store unquantized results.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import SWIGLU, Activation
from nanovllm.kernels.e4m3 import encode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.tiles import QuantizedRows, as_loadable, scale_of

ROW_MULTIPLE = 16  # the library's FP8 GEMMs need a multiple of 16 rows
SLOW_ROWS = range(129, 256)  # padded to 256: the library takes at least as long for them as for 256 rows


class Groups(NamedTuple):
    """The division of a row's `n` elements into groups of `size` elements that share a scale."""

    n: int
    size: int
    count: int  # groups of a program, a power of two
    width: int  # a power of two, at least `size`


@triton.jit
def positions_of(first_group, GROUPS: tl.constexpr):
    """Return the index in the row of each element of groups [count, width], and a mask of the elements that exist."""
    col = tl.arange(0, GROUPS.width)[None, :]
    at = (first_group + tl.arange(0, GROUPS.count))[:, None] * GROUPS.size + col
    return at, (at < GROUPS.n) & (col < GROUPS.size)


@triton.jit
def store_groups(x, out_ptrs, row, first_group, stride, GROUPS: tl.constexpr):
    """Store the groups x [count, width] of a row, starting with group `first_group`.

    Quantize the groups if there are scales. Elements of x that do not exist in the row must be 0.
    """
    out_ptr, scale_ptr = out_ptrs
    group = first_group + tl.arange(0, GROUPS.count)
    if scale_ptr is not None:
        scale, inverse = scale_of(tl.max(tl.abs(x), 1))
        x = encode_e4m3(x * inverse[:, None], out_ptr.dtype.element_ty)
    at, inside = positions_of(first_group, GROUPS)
    tl.store(out_ptr + row * GROUPS.n + at, x, inside)
    if scale_ptr is not None:
        tl.store(scale_ptr + group.to(tl.int64) * stride + row, scale, group * GROUPS.size < GROUPS.n)


@dependent_kernel()
@triton.jit(do_not_specialize=["scale_stride"])
def _groups_kernel(x_ptr, out_ptrs, scale_stride, GROUPS: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    """Each program stores some groups of one row."""
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS.count
    at, inside = positions_of(first_group, GROUPS)
    if ACT is not None:
        gate = tl.load(x_ptr + row * 2 * GROUPS.n + at, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * GROUPS.n + GROUPS.n + at, inside, 0.0)
        x = (activate(gate, 1.0, ACT).to(up.dtype) * up).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * GROUPS.n + at, inside, 0.0).to(tl.float32)
    store_groups(x, out_ptrs, row, first_group, scale_stride, GROUPS)


def empty_rows(num_rows: int, n: int, group: int, like: torch.Tensor) -> QuantizedRows:
    rows = -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if num_rows not in SLOW_ROWS else SLOW_ROWS.stop
    values = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=like.device)
    scales = torch.empty((n // group, rows), dtype=torch.float32, device=like.device).t()
    return QuantizedRows(values, scales, num_rows, like.dtype)


def outputs_of(rows: QuantizedRows) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """Return the tensors of `rows` that kernels write, and the stride between the scales of adjacent groups."""
    return (as_loadable(rows.values), rows.scales), rows.scales.stride(1)


def store_rows(
    x: torch.Tensor, outputs: tuple, scale_stride: int, groups: Groups, act: Activation | None, num_warps: int
) -> None:
    """Store x [T, K] group by group. If `act` is given, store the gated activation of x [T, 2 * K] instead."""
    assert act is None or not (act.shift or act.limit)  # parameters that would change `up`
    if len(x):
        grid = len(x), -(-groups.n // (groups.size * groups.count))
        constants = dict(GROUPS=groups, ACT=act, num_warps=num_warps)
        launch(_groups_kernel, grid, x.device)(x.contiguous(), outputs, scale_stride, **constants)


def quantize_rows(x: torch.Tensor, group: int, act: Activation | None = None) -> QuantizedRows:
    """Quantize x [T, K] to e4m3, with one scale per `group` inputs of a row. `group` divides K.

    If `act` is given, quantize the gated activation of x [T, 2 * K].
    """
    n = x.shape[1] // 2 if act else x.shape[1]
    rows, width = empty_rows(len(x), n, group, x), 1 << (group - 1).bit_length()
    count = min(1 << (n // group - 1).bit_length(), max(1, 2048 // width))
    groups = Groups(n, group, count, width)
    store_rows(x, *outputs_of(rows), groups, act, 4 if count * width <= 2048 else 8)
    return rows


def silu_and_mul_quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """Apply `silu_and_mul` to x [T, 2 * n], and quantize the result [T, n]."""
    return quantize_rows(x, group, SWIGLU)

"""What kernels share that read 8-bit values with scales."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.fp8 import decode_e4m3
from nanovllm.kernels.fp8_units import has_fp8_units


def as_loadable(values: torch.Tensor) -> torch.Tensor:
    """What kernels take for 8-bit values: the bits of e4m3 as uint8 where Triton can't load it (see fp8.py)."""
    if values.dtype == torch.float8_e4m3fn and not has_fp8_units(values.device):
        return values.view(torch.uint8)
    return values


def block_shape(values: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a weight [.., N, K] that share a scale."""
    return values.shape[-2] // scales.shape[-2], values.shape[-1] // scales.shape[-1]


@triton.jit
def scale_of(largest):
    """The scale of groups with these largest magnitudes, which become 448, and its inverse; zeros get one too."""
    largest = tl.maximum(largest, 1e-12)
    return largest / 448.0, 448.0 / largest


@triton.jit
def as_factor(x):
    """e4m3 for `tl.dot`: as it is, or where there are no FP8 units as float16, with the same products."""
    if x.dtype == tl.uint8:
        x = decode_e4m3(x, tl.float16)
    return x


@triton.jit
def dot_values(w, x, PRECISION: tl.constexpr):
    """The product of values w [N, C] and x [C, M]: of e4m3 if x is quantized too, else in the dtype of x."""
    if x.dtype == w.dtype:
        y = tl.dot(as_factor(w), as_factor(x))
    else:
        # by way of float32: there is no conversion of e4m3 to bfloat16 for compute capability 8.9
        y = tl.dot(decode_e4m3(w, tl.float32).to(x.dtype), x, input_precision=PRECISION)
    return y


@triton.jit
def scales_of_rows(scale_ptr, first_n, N, STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """The scales of ROWS rows of a weight, of which BLOCK_N share one: [1, 1] where all do, else [ROWS, 1]."""
    SIZE: tl.constexpr = 1 if BLOCK_N % ROWS == 0 else ROWS
    row = first_n + tl.arange(0, SIZE)
    return tl.load(scale_ptr + row // BLOCK_N * STRIDE, row < N, 0.0)[:, None]


@triton.jit
def scales_of_x(x_scale_ptr, begin, row, is_row, stride, GROUP: tl.constexpr):
    """The scales of rows [TILE_M] of quantized activations, for the GROUP of inputs from `begin` on; 1 without any."""
    if x_scale_ptr is None:
        scales = tl.full([row.shape[0]], 1.0, tl.float32)
    else:
        scales = tl.load(x_scale_ptr + begin // GROUP * stride + row, is_row, 0.0)
    return scales[None, :]


@triton.jit
def columns_of_parts(TILE_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_LANE: tl.constexpr):
    """The columns of a tile of a matrix-vector product as [parts, LANE], where a block's border cuts no part.

    LANE is MAX_LANE, or less if blocks are narrower. A thread has a part both of the weights and of x, so that few
    values change threads.
    """
    LANE: tl.constexpr = BLOCK_K if BLOCK_K < MAX_LANE else MAX_LANE
    return tl.arange(0, TILE_K // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]

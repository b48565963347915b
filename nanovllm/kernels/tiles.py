"""What products share: how they are divided, and tiles of matrices, some of them of 8-bit values with scales."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.fp8 import decode_e4m3
from nanovllm.kernels.fp8_units import has_fp8_units


class Tiles(NamedTuple):
    """How a product is divided."""

    tile_n: int
    tile_k: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [T, K] as e4m3 times scales. Rows after those are padding, which is not initialized."""

    values: torch.Tensor  # [T and padding, K] float8_e4m3fn
    scales: torch.Tensor  # [T and padding, K / group] float32, the scales of a group of inputs next to each other
    num_rows: int
    dtype: torch.dtype  # of the activations before, and of products

    def __len__(self) -> int:
        return self.num_rows


def tensors_of(x: torch.Tensor | QuantizedRows) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """What a kernel takes for activations: their elements, scales, and the stride from one group's to the next."""
    if isinstance(x, QuantizedRows):
        return as_loadable(x.values), x.scales, x.scales.stride(1)
    return x, None, 0


def group_size(x: torch.Tensor | QuantizedRows, num_inputs: int) -> int:
    """How many inputs of a row share a scale; all where there are no scales."""
    return num_inputs // x.scales.shape[1] if isinstance(x, QuantizedRows) else num_inputs


def as_loadable(values: torch.Tensor) -> torch.Tensor:
    """What kernels take for 8-bit values: the bits of e4m3 as uint8 where Triton can't load it (see fp8.py)."""
    if values.dtype == torch.float8_e4m3fn and not has_fp8_units(values.device):
        return values.view(torch.uint8)
    return values


def block_shape(values: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int]:
    """Rows and columns of a weight [.., N, K] that share a scale.

    A row where there are no scales: kernels are compiled for a shape of blocks, and not again for each N.
    """
    if scales is None:
        return 1, values.shape[-1]
    return values.shape[-2] // scales.shape[-2], values.shape[-1] // scales.shape[-1]


@triton.jit
def load_tile(
    tiles, ptr, first_row, begin, is_row, K: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr
):
    """A tile [ROWS, TILE_K] of a matrix with K columns, from its descriptor, or its pointer on GPUs without TMA.

    A descriptor also reads rows that are not `is_row`, and zeros beyond the matrix.
    """
    if TMA:
        tile = tiles.load([first_row, begin])
    else:
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        k = begin + tl.arange(0, TILE_K)
        tile = tl.load(ptr + row[:, None] * K + k[None, :], is_row[:, None] & (k < K)[None, :], 0.0)
    return tile


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
def times_scales(
    y,
    x_scales,
    w_scales,
    begin,
    K: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """y [ROWS, M] times the scales of the M rows of x and of these ROWS of the weight.

    WHOLE: only those that all K inputs share; else only those that fewer share, for the inputs from `begin` on.
    x_scales: pointer, row, whether it is one, stride of groups. w_scales: pointer, first row, the row after the last.
    """
    x_scale_ptr, row, is_row, stride = x_scales
    scale_ptr, first_n, end_n = w_scales
    if (X_GROUP == K) == WHOLE:
        y *= scales_of_x(x_scale_ptr, begin, row, is_row, stride, X_GROUP)
    if (BLOCK_K == K) == WHOLE:
        y *= scales_of_rows(scale_ptr + begin // BLOCK_K, first_n, end_n, K // BLOCK_K, BLOCK_N, ROWS)
    return y


@triton.jit
def add_product(
    acc,
    w,
    x,
    x_scales,
    w_scales,
    begin,
    K: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """acc [ROWS, M] plus w [ROWS, C] times x [C, M], the inputs from `begin` on; scales as for `times_scales`."""
    if IS_SCALED:
        product = dot_values(w, x, PRECISION)
        acc += times_scales(product, x_scales, w_scales, begin, K, X_GROUP, BLOCK_N, BLOCK_K, ROWS, False)
    else:
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def columns_of_parts(TILE_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_LANE: tl.constexpr):
    """The columns of a tile of a matrix-vector product as [parts, LANE], where a block's border cuts no part.

    LANE is MAX_LANE, or less if blocks are narrower. A thread has a part both of the weights and of x, so that few
    values change threads.
    """
    LANE: tl.constexpr = BLOCK_K if BLOCK_K < MAX_LANE else MAX_LANE
    return tl.arange(0, TILE_K // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]

"""What products share: how they are divided, and tiles of matrices, some of them of 8-bit values with scales."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.gpu_features import has_fp8_units

SWIGLU_GROUP = 128  # inputs, outputs, and weights in both directions that share a scale in hopper_swiglu.py
NO_NORM = None, 0.0  # in the place of a norm's weight and its eps
Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [.., N, K]; or such values of 8 bits, and their scales


class Tiles(NamedTuple):
    """How a product is divided; a constant of kernels."""

    tile_n: int
    tile_k: int
    stages: int
    warps: int
    tile_m: int = 0  # where a table of tiles is not by it
    tma: bool = True  # tiles are loaded from descriptors, not pointers


class Shape(NamedTuple):
    """How many inputs a product has, and which share a scale; a constant of kernels.

    Where there are no scales, all inputs of a row do: kernels are not compiled again for each N.
    """

    k: int
    k_per_split: int
    x_group: int  # inputs of a row of x
    block_n: int  # rows of the weight, and
    block_k: int  # its inputs
    split_k: int = 1


class Scales(NamedTuple):
    """The scales of x and of the weight for a kernel; None where they have none."""

    x: torch.Tensor | None
    x_stride: int  # from the scales of one group of inputs to those of the next
    w: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [T, K] as e4m3 times scales. Rows after those are padding, which is not initialized."""

    values: torch.Tensor  # [T and padding, K] float8_e4m3fn
    scales: torch.Tensor  # [T and padding, K / group] float32, the scales of a group of inputs next to each other
    num_rows: int
    dtype: torch.dtype  # of the activations before, and of products

    def __len__(self) -> int:
        return self.num_rows


def values_and_scales(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight if isinstance(weight, tuple) else (weight, None)


def operands_of(x: torch.Tensor | QuantizedRows, weight: Weight) -> tuple[torch.Tensor, torch.Tensor, Scales, Shape]:
    """What a kernel takes for activations and a weight [.., N, K]: their elements and scales, and the shape."""
    values, scales = values_and_scales(weight)
    values, shape = as_loadable(values), shape_of(values, scales)
    if not isinstance(x, QuantizedRows):
        return x, values, Scales(None, 0, scales), shape
    shape = shape._replace(x_group=shape.k // x.scales.shape[1])
    return as_loadable(x.values), values, Scales(x.scales, x.scales.stride(1), scales), shape


def shape_of(values: torch.Tensor, scales: torch.Tensor | None) -> Shape:
    """The shape of a product of unquantized activations, which is not split."""
    k = values.shape[-1]
    return Shape(k, k, k, *block_shape(values, scales))


def as_loadable(values: torch.Tensor) -> torch.Tensor:
    """What kernels take for 8-bit values: the bits of e4m3 as uint8 where Triton can't load it (see fp8.py)."""
    if values.dtype == torch.float8_e4m3fn and not has_fp8_units(values.device):
        return values.view(torch.uint8)
    return values


def block_shape(values: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int]:
    """Rows and columns of a weight [.., N, K] that share a scale; a row where there are no scales."""
    if scales is None:
        return 1, values.shape[-1]
    return values.shape[-2] // scales.shape[-2], values.shape[-1] // scales.shape[-1]


@triton.jit
def load_tile(tiles, first_row, begin, is_row, K: tl.constexpr, TILES: tl.constexpr):
    """A tile [rows, tile_k] of a matrix with K columns, from its descriptor, or its pointer on GPUs without TMA.

    A descriptor also reads rows that are not `is_row`, and zeros beyond the matrix.
    """
    if TILES.tma:
        tile = tiles.load([first_row, begin])
    else:
        row = (first_row + tl.arange(0, is_row.shape[0])).to(tl.int64)
        k = begin + tl.arange(0, TILES.tile_k)
        tile = tl.load(tiles + row[:, None] * K + k[None, :], is_row[:, None] & (k < K)[None, :], 0.0)
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
def dot_values(w, x):
    """The product of values w [N, C] and x [C, M]: of e4m3 if x is quantized too, else in the dtype of x."""
    if x.dtype == w.dtype:
        y = tl.dot(as_factor(w), as_factor(x))
    else:
        # by way of float32: there is no conversion of e4m3 to bfloat16 for compute capability 8.9
        y = tl.dot(decode_e4m3(w, tl.float32).to(x.dtype), x, input_precision="ieee")
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
def times_scales(y, x_scales, w_scales, begin, SHAPE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """y [tile_n, M] times the scales of the M rows of x and of these tile_n of the weight, if it has scales.

    WHOLE: only those that all inputs share; else only those that fewer share, for the inputs from `begin` on.
    x_scales: pointer, row, whether it is one, stride of groups. w_scales: pointer, first row, the row after the last.
    """
    x_scale_ptr, row, is_row, stride = x_scales
    scale_ptr, first_n, end_n = w_scales
    if scale_ptr is not None:
        if (SHAPE.x_group == SHAPE.k) == WHOLE:
            y *= scales_of_x(x_scale_ptr, begin, row, is_row, stride, SHAPE.x_group)
        if (SHAPE.block_k == SHAPE.k) == WHOLE:
            scales_at = scale_ptr + begin // SHAPE.block_k
            y *= scales_of_rows(scales_at, first_n, end_n, SHAPE.k // SHAPE.block_k, SHAPE.block_n, TILES.tile_n)
    return y


@triton.jit
def add_product(acc, w, x, x_scales, w_scales, begin, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """acc [tile_n, M] plus w [tile_n, C] times x [C, M], the inputs from `begin` on; scales as for `times_scales`."""
    if w_scales[0] is None:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    else:
        acc += times_scales(dot_values(w, x), x_scales, w_scales, begin, SHAPE, TILES, False)
    return acc


@triton.jit
def columns_of_parts(TILE_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_LANE: tl.constexpr):
    """The columns of a tile of a matrix-vector product as [parts, LANE], where a block's border cuts no part.

    LANE is MAX_LANE, or less if blocks are narrower. A thread has a part both of the weights and of x, so that few
    values change threads.
    """
    LANE: tl.constexpr = BLOCK_K if BLOCK_K < MAX_LANE else MAX_LANE
    return tl.arange(0, TILE_K // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]

"""Shared code of the matmul kernels: tile sizes, loading of tiles, and scales of 8-bit values."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.gpu_features import has_fp8_units

SWIGLU_GROUP = 128  # the size of all groups and blocks that share a scale in hopper_gated.py
NO_NORM = None, 0.0  # instead of a norm's weight and eps
Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [.., N, K]; or 8-bit values [.., N, K] and their scales


class Tiles(NamedTuple):
    tile_n: int
    tile_k: int
    stages: int
    warps: int
    tile_m: int = 0  # rows of x; 0 if the number is set elsewhere
    tma: bool = True  # tiles are loaded from descriptors, not from pointers


class Shape(NamedTuple):
    """The number of inputs of a matmul, and the number of inputs that share a scale, as a compile-time constant.

    Without scales, a block is one row of the weight, so that one compiled kernel works for all numbers of outputs.
    """

    k: int
    k_per_split: int
    x_group: int  # inputs of a row of x that share a scale
    block_n: int  # rows of a block of the weight
    block_k: int  # inputs of a block of the weight
    split_k: int = 1


class Scales(NamedTuple):
    """The scales of x and of the weight. If a tensor has no scales, its field is `None`."""

    x: torch.Tensor | None
    x_stride: int  # between the scales of adjacent groups of inputs
    w: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [T, K] as e4m3 values and scales. Rows after the first T are uninitialized padding."""

    values: torch.Tensor  # [T + padding, K] float8_e4m3fn
    scales: torch.Tensor  # [T + padding, K / group] float32, column-major: the scales of a group are adjacent
    num_rows: int  # T
    dtype: torch.dtype  # of the activations before quantization, and of the results of matmuls

    def __len__(self) -> int:
        return self.num_rows


def values_and_scales(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight if isinstance(weight, tuple) else (weight, None)


def operands_of(x: torch.Tensor | QuantizedRows, weight: Weight) -> tuple[torch.Tensor, torch.Tensor, Scales, Shape]:
    """Return the arguments that pass activations x and a weight [.., N, K] to a kernel.

    The arguments are the elements of x, the elements of the weight, the scales of both, and the shape.
    """
    values, scales = values_and_scales(weight)
    values, shape = as_loadable(values), shape_of(values, scales)
    if not isinstance(x, QuantizedRows):
        return x, values, Scales(None, 0, scales), shape
    shape = shape._replace(x_group=shape.k // x.scales.shape[1])
    return as_loadable(x.values), values, Scales(x.scales, x.scales.stride(1), scales), shape


def shape_of(values: torch.Tensor, scales: torch.Tensor | None) -> Shape:
    """Return the Shape of a weight. Its matmul uses neither split-K nor quantized activations."""
    k = values.shape[-1]
    return Shape(k, k, k, *block_shape(values, scales))


def as_loadable(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3 values as uint8 on devices where Triton can't load e4m3 (see e4m3.py)."""
    if values.dtype == torch.float8_e4m3fn and not has_fp8_units(values.device):
        return values.view(torch.uint8)
    return values


def block_shape(values: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int]:
    """Return the size (rows, columns) of a weight's scale blocks. Without scales, the size is (1, K)."""
    if scales is None:
        return 1, values.shape[-1]
    return values.shape[-2] // scales.shape[-2], values.shape[-1] // scales.shape[-1]


@triton.jit
def load_tile(tiles, first_row, begin, is_row, K: tl.constexpr, TILES: tl.constexpr):
    """Load a tile [rows, tile_k] of a matrix with K columns.

    `tiles` is a TMA descriptor or, without TMA, a pointer. Loads through a descriptor ignore the mask `is_row` [rows],
    and return zeros outside the matrix.
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
    """Return the scales `largest` / 448, which are never 0, and the inverse scales."""
    largest = tl.maximum(largest, 1e-12)
    return largest / 448.0, 448.0 / largest


@triton.jit
def as_factor(x):
    """Convert e4m3 bits to float16, so that `tl.dot` computes the same results as FP8 units.

    Return tensors in e4m3 unchanged.
    """
    if x.dtype == tl.uint8:
        x = decode_e4m3(x, tl.float16)
    return x


@triton.jit
def dot_values(w, x):
    """Multiply weight values w [N, C] by x [C, M], in FP8 if x is quantized, otherwise in the dtype of x."""
    if x.dtype == w.dtype:
        y = tl.dot(as_factor(w), as_factor(x))
    else:
        # through float32, because compute capability 8.9 can't convert e4m3 to bfloat16
        y = tl.dot(decode_e4m3(w, tl.float32).to(x.dtype), x, input_precision="ieee")
    return y


@triton.jit
def scales_of_rows(scale_ptr, first_n, N, STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Load the scales [ROWS, 1] of ROWS rows of a weight, or [1, 1] if all rows share a scale."""
    SIZE: tl.constexpr = 1 if BLOCK_N % ROWS == 0 else ROWS
    row = first_n + tl.arange(0, SIZE)
    return tl.load(scale_ptr + row // BLOCK_N * STRIDE, row < N, 0.0)[:, None]


@triton.jit
def scales_of_x(x_scale_ptr, begin, row, is_row, stride, GROUP: tl.constexpr):
    """Load the scales [1, TILE_M] of rows of x. The scales belong to GROUP inputs from `begin` on. The default is 1."""
    if x_scale_ptr is None:
        scales = tl.full([row.shape[0]], 1.0, tl.float32)
    else:
        scales = tl.load(x_scale_ptr + begin // GROUP * stride + row, is_row, 0.0)
    return scales[None, :]


@triton.jit
def times_scales(y, x_scales, w_scales, begin, SHAPE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """If the weight has scales, multiply y [tile_n, M] by the scales of the weight's rows and of x's rows.

    If WHOLE is set, apply only the scales of whole rows. If WHOLE is not set, apply only the scales of the group of
    inputs at `begin`.

    `x_scales` is (pointer, rows, mask of existing rows, stride between groups). `w_scales` is (pointer, first row, end
    row).
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
    """Return acc [tile_n, M] + w [tile_n, C] x [C, M].

    If there are scales, `times_scales` applies the scales to the product w x. `begin` is the index of the first of the
    C inputs.
    """
    if w_scales[0] is None:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    else:
        acc += times_scales(dot_values(w, x), x_scales, w_scales, begin, SHAPE, TILES, False)
    return acc


@triton.jit
def columns_of_parts(TILE_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_LANE: tl.constexpr):
    """Return the column indices of a tile, divided into [parts, LANE] for a matrix-vector multiplication.

    All weights of a part share a scale, so LANE is at most the width of a block. Each thread holds matching parts of
    the weights and of x, so few values are exchanged between threads.
    """
    LANE: tl.constexpr = BLOCK_K if BLOCK_K < MAX_LANE else MAX_LANE
    return tl.arange(0, TILE_K // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]

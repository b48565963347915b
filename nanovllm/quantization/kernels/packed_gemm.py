"""Computes y = x W^T with 4-bit W, for any number of rows. Also converts W to the dtype of the activations.

packed.py defines the layout of W. A tile contains 16 words of each of its rows of W. The 16 words consist of eight
slices of 16 adjacent inputs. `tl.dot` multiplies one slice at a time, so that threads need not exchange codes.
"""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import activation_of
from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.hopper.hopper_tiles import SMALL_TILE_M, packed_tile
from nanovllm.kernels.launch.dependent_launch import IS_TRITON_3_4, dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.kernels.linear.tiles import Tiles, as_loadable

MAX_PACKED_ROWS = 128  # with more rows, converting the weights for a GEMM of the library is faster
NUM_WARPS = 16  # warps that a multiprocessor should get
FEW_ROWS = 16 if IS_TRITON_3_4 else 8  # the smallest number of rows that `tl.dot` multiplies
LARGE_TILE_M = 64
ONE_GROUP = 2**30  # the group size if a row is one group
WORDS = tl.constexpr(16)  # words per row of a tile; also the number of inputs per slice
INPUTS = tl.constexpr(128)  # inputs per tile


class PackedShape(NamedTuple):
    """Contains the constants of a kernel: the sizes and the format of a weight, and the tile sizes."""

    k: int
    words: int  # per row
    groups: int  # per row
    group_size: int  # divides INPUTS, or is a multiple of INPUTS
    is_e2m1: bool
    is_e8m0: bool  # scales are powers of two; other 8-bit scales are e4m3
    assembly: tuple[str, ...]  # from `assembly_of`, for each slice; empty in Triton's interpreter and for float32
    words_per_split: int
    tile_n: int
    tile_m: int
    stages: int
    fills_tiles: bool  # whether tiles contain no inputs beyond the last


@cache
def assembly_of(is_e2m1: bool, dtype: torch.dtype, is_scaled_later: bool = False) -> tuple[str, ...]:
    """Return, for each slice of a tile, the instructions that convert the slice.

    The compiler would use twice as many instructions.

    $1 and $2 are adjacent words. $0 receives the values of both words as a pair of 16-bit numbers, plus the pair $3.
    `prmt` combines halves of both words, so that the next instructions extract both codes together. The bits of an
    integer replace the last bits of the number 128 (bfloat16) or 1024 (float16). Adding $3 subtracts 128 or 1024 again.
    The bits of an e2m1 number become the bits of a number whose exponent is too small. A multiplication by a power of
    two corrects the exponent. If `is_scaled_later` is True, the caller multiplies by the power of two.
    """
    is_half = dtype == torch.float16
    kind = "f16x2" if is_half else "bf16x2"
    if is_e2m1:
        factor, magnitude, end = (0x74007400, 0x0E000E00, 9) if is_half else (0x7E807E80, 0x01C001C0, 6)
    else:
        factor, base = (0x3C003C00, 0x64006400) if is_half else (0x3F803F80, 0x43004300)
    slices = []
    for j in range(8):
        bit, half = j % 4 * 4, "0x5410" if j < 4 else "0x7632"
        lines = [".reg .b32 codes, number, factor;", f"prmt.b32 codes, $1, $2, {half};"]
        if is_e2m1:
            shift = f"shl.b32 number, codes, {end - bit};" if bit < end else f"shr.u32 number, codes, {bit - end};"
            lines += [shift, f"and.b32 number, number, {magnitude:#x};", f"shl.b32 codes, codes, {12 - bit};"]
            lines += ["lop3.b32 number, codes, 0x80008000, number, 0xEA;"]  # codes & sign | number
        else:
            lines += [f"shr.u32 codes, codes, {bit};", f"lop3.b32 number, codes, 0x000F000F, {base:#x}, 0xEA;"]
        if is_scaled_later:
            lines += ["mov.b32 $0, number;"]
        else:
            lines += [f"mov.b32 factor, {factor:#x};", f"fma.rn.{kind} $0, number, factor, $3;"]
        slices.append("{" + " ".join(lines) + "}")
    return tuple(slices)


@triton.jit
def _slice(words, zeros, j: tl.constexpr, dtype: tl.constexpr, SHAPE: tl.constexpr):
    """Return slice j of a tile of words [rows, WORDS].

    The result contains the values minus their zero points, in `dtype`.
    """
    if len(SHAPE.assembly) > 0:
        if SHAPE.is_e2m1:
            summand = tl.full([1, 1], 0.0, dtype)
        else:
            summand = (-zeros - (1024.0 if dtype == tl.float16 else 128.0)).to(dtype)
        bits = tl.inline_asm_elementwise(
            SHAPE.assembly[j], "=r,r,r,r", [words, summand], dtype=tl.int16, is_pure=True, pack=2
        )
        values = bits.to(dtype, bitcast=True)
    else:
        codes = (words >> 4 * j) & 15
        if SHAPE.is_e2m1:  # a float16 with these bits has an exponent that is 14 too small
            bits = ((codes & 8) << 12 | (codes & 7) << 9).to(tl.int16)
            values = (bits.to(tl.float16, bitcast=True) * 16384.0).to(dtype)
        else:
            values = (codes.to(tl.float32) - zeros).to(dtype)
    return values


@triton.jit
def _scales_and_zeros(w_ptrs, row, is_row, first_k, SHAPE: tl.constexpr):
    """Load the scales and zero points of the slice that begins at input `first_k`, as float32 [rows, 1].

    If the inputs of a group are not contiguous, the shape is [rows, WORDS].
    """
    _, scale_ptr, zero_ptr, _, ids_ptr = w_ptrs
    if ids_ptr is not None:
        k = first_k + tl.arange(0, WORDS)
        group = tl.load(ids_ptr + k, k < SHAPE.k, 0)[None, :]
    else:
        group = tl.full([1, 1], 0, tl.int32) + first_k // SHAPE.group_size
    at, inside = row[:, None] * SHAPE.groups + group, is_row[:, None]
    if not SHAPE.fills_tiles:
        inside = inside & (group < SHAPE.groups)
    scales = tl.load(scale_ptr + at, inside, 0.0)
    if SHAPE.is_e8m0:  # the exponent of a float32; 2**-127 is subnormal
        exponents = scales.to(tl.int32)
        scales = tl.where(exponents == 0, 0x400000, exponents << 23).to(tl.float32, bitcast=True)
    else:
        scales = decode_e4m3(scales, tl.float32)  # also converts 16-bit scales
    if zero_ptr is not None:
        zeros = tl.load(zero_ptr + at, inside, 0).to(tl.float32)
    else:
        zeros = tl.full([1, 1], 8.0, tl.float32)
    return scales, zeros


@triton.jit
def add_packed_product(acc, x_ptr, x_row, is_x_row, w_ptrs, row, is_row, first, end, SHAPE: tl.constexpr):
    """Return acc + W x^T, which is [tile_n, tile_m]. The product is computed over words `first` to `end` of W.

    `row` contains the tile's rows of W, and `x_row` its rows of x. `w_ptrs` points to words, scales, zero points, row
    factors, and group ids. The caller applies the row factors.
    """
    IS_CONTIGUOUS: tl.constexpr = w_ptrs[4] is None
    GROUPS: tl.constexpr = INPUTS // SHAPE.group_size if IS_CONTIGUOUS and SHAPE.group_size < INPUTS else 1  # per tile
    SLICES: tl.constexpr = 8 // GROUPS  # per group
    i = tl.arange(0, WORDS)
    words_at = w_ptrs[0] + row.to(tl.int64)[:, None] * SHAPE.words + i[None, :]
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * SHAPE.k + i[None, :]
    for begin in tl.range(first, end, WORDS, num_stages=SHAPE.stages):
        words = tl.load(words_at + begin, is_row[:, None], 0)
        for g in tl.static_range(GROUPS):
            part = tl.zeros([row.shape[0], x_row.shape[0]], tl.float32)
            if IS_CONTIGUOUS:
                scales, zeros = _scales_and_zeros(w_ptrs, row, is_row, begin * 8 + g * SLICES * WORDS, SHAPE)
            for j in tl.static_range(g * SLICES, (g + 1) * SLICES):
                first_k = begin * 8 + j * WORDS
                is_x = is_x_row[:, None]
                if not SHAPE.fills_tiles:
                    is_x = is_x & (first_k + i < SHAPE.k)[None, :]
                x = tl.load(x_at + first_k, is_x, 0.0)
                if not IS_CONTIGUOUS:
                    scales, zeros = _scales_and_zeros(w_ptrs, row, is_row, first_k, SHAPE)
                w = _slice(words, zeros, j, x.dtype, SHAPE)
                if not IS_CONTIGUOUS:
                    w = (w.to(tl.float32) * scales).to(x.dtype)
                part = tl.dot(w, x.T, part, input_precision="ieee")
            acc += part * scales if IS_CONTIGUOUS else part
    return acc


@triton.jit
def times_row_scales(y, w_ptrs, row, is_row):
    """If the rows of the weight have factors, multiply y [tile_n, tile_m] by the factors."""
    if w_ptrs[3] is not None:
        y *= tl.load(w_ptrs[3] + row, is_row, 0.0)[:, None]
    return y


@dependent_kernel()
@triton.jit(do_not_specialize=["M"])
def _packed_gemm_kernel(x_ptr, w_ptrs, out_ptr, M, N, SHAPE: tl.constexpr, PDL: tl.constexpr):
    # A program computes an output tile [tile_m, tile_n] over the inputs of one split.
    gdc_launch_and_wait(PDL)
    n = tl.program_id(0) * SHAPE.tile_n + tl.arange(0, SHAPE.tile_n)
    m = tl.program_id(1) * SHAPE.tile_m + tl.arange(0, SHAPE.tile_m)
    split = tl.program_id(2)
    first = split * SHAPE.words_per_split
    end = tl.minimum(first + SHAPE.words_per_split, SHAPE.words)
    # transposed, as in split_k_gemm.py
    acc = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    acc = add_packed_product(acc, x_ptr, m, m < M, w_ptrs, n, n < N, first, end, SHAPE)
    acc = times_row_scales(acc, w_ptrs, n, n < N)
    out = out_ptr + (split * M + m[:, None]) * N + n[None, :]
    tl.store(out, acc.T.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


@dependent_kernel()
@triton.jit
def _dequantize_packed_kernel(w_ptrs, out_ptr, N, SHAPE: tl.constexpr, PDL: tl.constexpr):
    # A program converts tile_n rows of a tile.
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0) * SHAPE.tile_n + tl.arange(0, SHAPE.tile_n)
    is_row, i, begin = row < N, tl.arange(0, WORDS), tl.program_id(1) * WORDS
    words = tl.load(w_ptrs[0] + row.to(tl.int64)[:, None] * SHAPE.words + begin + i[None, :], is_row[:, None], 0)
    for j in tl.static_range(8):
        first_k = begin * 8 + j * WORDS
        scales, zeros = _scales_and_zeros(w_ptrs, row, is_row, first_k, SHAPE)
        w = times_row_scales(_slice(words, zeros, j, tl.float32, SHAPE) * scales, w_ptrs, row, is_row)
        out = out_ptr + row.to(tl.int64)[:, None] * SHAPE.k + first_k + i[None, :]
        tl.store(out, w.to(out_ptr.dtype.element_ty), is_row[:, None] & (first_k + i < SHAPE.k)[None, :])


WHOLE = Tiles(64, INPUTS.value, 1, 4)


def packed_operands(weight, dtype: torch.dtype, tiles: Tiles = WHOLE, split_k: int = 1) -> tuple[tuple, PackedShape]:
    """Return the pointers and constants that a kernel needs to convert a weight to `dtype`."""
    words, scales, zeros, row_scales, group_ids = weight[:5]
    (*_, num_words), groups, is_e2m1 = words.shape, scales.shape[-1], weight.codes == "e2m1"
    has_assembly = words.is_cuda and dtype != torch.float32
    shape = PackedShape(
        *(weight.k, num_words, groups, ONE_GROUP if groups == 1 else weight.group_size),
        *(is_e2m1, scales.dtype == torch.float8_e8m0fnu, assembly_of(is_e2m1, dtype) if has_assembly else ()),
        triton.cdiv(num_words, split_k * WORDS.value) * WORDS.value,
        *(tiles.tile_n, tiles.tile_m, tiles.stages, weight.k % INPUTS.value == 0),
    )
    scales = scales.view(torch.uint8) if shape.is_e8m0 else as_loadable(scales)
    return (words, scales, zeros, row_scales, group_ids), shape


def packed_tiles(num_rows: int) -> Tiles:
    """Return the tile sizes for x with `num_rows` rows.

    If there are few rows, a program has one warp, which needs no barriers. If there are many rows, tiles are wide, so
    that x is read less often.
    """
    tile_m = min(LARGE_TILE_M, max(FEW_ROWS, triton.next_power_of_2(num_rows)))
    if tile_m <= 16:
        return Tiles(32, INPUTS.value, 6, 1, tile_m) if num_rows <= FEW_ROWS else Tiles(64, INPUTS.value, 3, 2, tile_m)
    return Tiles(64, INPUTS.value, 5 if tile_m == 32 else 3, 4, tile_m)


def packed_gemm(
    x: torch.Tensor, weight, split_k: int = 1, out: torch.Tensor | None = None, tiles: Tiles | None = None
) -> torch.Tensor:
    """Return the partial sums of x W^T in `out` [split_k, M, N].

    x [M, K] and the Packed weight [N, K] are contiguous.
    """
    m, n = len(x), len(weight.words)
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=x.device) if out is None else out
    tiles = tiles or packed_tiles(m)
    pointers, shape = packed_operands(weight, x.dtype, tiles, split_k)
    grid = triton.cdiv(n, tiles.tile_n), triton.cdiv(m, tiles.tile_m), split_k
    launch(_packed_gemm_kernel, grid, x.device)(x, pointers, out, m, n, SHAPE=shape, num_warps=tiles.warps)
    return out


def best_packed_split_k(x, weight, max_split_k):
    if (tile := packed_tile(x, weight, max_split_k)) is not None:
        return tile.split_k
    num_rows = len(x)
    if not 0 < num_rows <= MAX_PACKED_ROWS:
        return 1
    tiles = packed_tiles(num_rows)
    num_warps = triton.cdiv(len(weight.words), tiles.tile_n) * triton.cdiv(num_rows, tiles.tile_m) * tiles.warps
    return max(1, min(max_split_k, NUM_WARPS * num_sms(x.device) // num_warps))


def packed_linear(x, weight, bias=None, act=None, split_k=1, out=None):
    if (tile := packed_tile(x, weight, split_k)) is not None and tile.split_k == split_k:
        from nanovllm.quantization.kernels.hopper_packed_gemm import hopper_packed_gemm  # needs Gluon of Triton 3.6

        if act is not None and tile.rows == SMALL_TILE_M and weight.zeros is None:
            return hopper_packed_gemm(x.contiguous(), weight, tile, None, bias, activation_of(act))[0]
        y = hopper_packed_gemm(x.contiguous(), weight, tile, out)
    elif 0 < len(x) <= MAX_PACKED_ROWS:
        y = packed_gemm(x.contiguous(), weight, split_k, out)
    else:
        return NotImplemented
    if bias is not None:
        y += bias
    y = y if split_k > 1 else y[0]
    return y if act is None else act(y)


def dequantize_packed(weight, dtype: torch.dtype) -> torch.Tensor:
    """Convert a Packed weight [N, K] to `dtype`. If the groups are contiguous, `weight` may be a stack of weights."""
    *sizes, _ = weight.words.shape
    out = torch.empty((*sizes, weight.k), dtype=dtype, device=weight.device)
    pointers, shape = packed_operands(weight, torch.float32)
    grid = triton.cdiv(num_rows := prod(sizes), 64), shape.words // WORDS.value
    launch(_dequantize_packed_kernel, grid, weight.device)(pointers, out, num_rows, SHAPE=shape, num_warps=4)
    return out

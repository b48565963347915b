"""Computes y = x W^T with 4-bit W, for one row and for many, and converts W to the dtype of the activations.

packed.py defines the layout of W. A tile of words contains eight tiles of codes, each with the same number of inputs.
`tl.dot` multiplies these tiles one after another, so codes never move between threads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms

MAX_PACKED_ROWS = 128  # with more rows, converting the weights for a GEMM of the library is faster
NUM_PROGRAMS = 4  # that a multiprocessor should get; reading the weights is the limit
ONE_GROUP = 2**30  # the group size if a row is one group, so that a tile lies in one group
SMALL_TILE_M, LARGE_TILE_M = 16, 64


class PackedShape(NamedTuple):
    """The sizes and the format of a weight, and the tile sizes (a kernel constant)."""

    k: int
    words: int  # of a row
    groups: int  # of a row
    group_size: int
    is_e2m1: bool
    is_e8m0: bool  # scales are powers of two; other 8-bit scales are e4m3
    words_per_split: int
    tile_n: int
    tile_m: int
    tile_words: int
    stages: int


@triton.jit
def _decode(codes, IS_E2M1: tl.constexpr):
    """Convert codes in int32 to float32. Integers stay unsigned."""
    if IS_E2M1:
        # a float16 with these bits has an exponent that is 14 too small
        bits = ((codes & 8) << 12 | (codes & 7) << 9).to(tl.int16)
        values = (bits.to(tl.float16, bitcast=True) * 16384.0).to(tl.float32)
    else:  # the last bits of a float32 from 2**23 on are an integer; GPUs convert integers slowly
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return values


@triton.jit
def _load_scales(w_ptrs, at, inside, SHAPE: tl.constexpr):
    """Load scales as float32, and zero points."""
    _, scale_ptr, zero_ptr, _, _ = w_ptrs
    scales = tl.load(scale_ptr + at, inside, 0.0 if scale_ptr.dtype.element_ty.is_floating() else 0)
    if SHAPE.is_e8m0:  # the exponent of a float32; 2**-127 is subnormal
        scales = scales.to(tl.int32)
        scales = tl.where(scales == 0, 0x400000, scales << 23).to(tl.float32, bitcast=True)
    elif scales.dtype == tl.uint8:
        scales = decode_e4m3(scales, tl.float32)
    else:
        scales = scales.to(tl.float32)
    if zero_ptr is not None:
        zeros = tl.load(zero_ptr + at, inside, 0).to(tl.float32)
    else:
        zeros = 0.0 if SHAPE.is_e2m1 else 8.0
    return scales, zeros


@triton.jit
def _scales_of_inputs(w_ptrs, row, k, is_row, SHAPE: tl.constexpr):
    """Load the scales and zero points [rows, inputs] of inputs k."""
    is_input = k < SHAPE.k
    if w_ptrs[4] is not None:
        group = tl.load(w_ptrs[4] + k, is_input, 0)
    else:
        group = k // SHAPE.group_size
    at = row[:, None] * SHAPE.groups + group[None, :]
    return _load_scales(w_ptrs, at, is_row[:, None] & is_input[None, :], SHAPE)


@triton.jit
def add_packed_product(acc, x_ptr, x_row, is_x_row, w_ptrs, row, is_row, first, end, SHAPE: tl.constexpr):
    """Return acc [tile_n, tile_m] + W x^T for rows `row` of W and `x_row` of x, over the words from `first` to `end`.

    `w_ptrs` has the words, scales, zero points, factors of rows (which the caller applies), and groups of inputs.
    """
    TILE_K: tl.constexpr = SHAPE.tile_words * 8
    # a tile lies in one group: the scale multiplies the result
    IS_ONE_GROUP: tl.constexpr = w_ptrs[4] is None and SHAPE.group_size % TILE_K == 0
    words_at = w_ptrs[0] + row.to(tl.int64)[:, None] * SHAPE.words
    for begin in tl.range(first, end, SHAPE.tile_words, num_stages=SHAPE.stages):
        word = begin + tl.arange(0, SHAPE.tile_words)
        words = tl.load(words_at + word[None, :], is_row[:, None] & (word < SHAPE.words)[None, :], 0)
        first_k = word // 8 * 64 + word % 8
        part = tl.zeros([row.shape[0], x_row.shape[0]], tl.float32)
        if IS_ONE_GROUP:
            at = row * SHAPE.groups + begin * 8 // SHAPE.group_size
            scales, zeros = _load_scales(w_ptrs, at, is_row, SHAPE)
            scales = scales[:, None]
            if w_ptrs[2] is not None:
                zeros = zeros[:, None]
        for j in tl.static_range(8):
            k = first_k + 8 * j
            is_x = is_x_row[:, None] & (k < SHAPE.k)[None, :]
            x = tl.load(x_ptr + x_row.to(tl.int64)[:, None] * SHAPE.k + k[None, :], is_x, 0.0)
            w = _decode((words >> 4 * j) & 15, SHAPE.is_e2m1)
            if IS_ONE_GROUP:
                part = tl.dot((w - zeros).to(x.dtype), x.T, part, input_precision="ieee")
            else:
                # eight adjacent inputs have the same scales, unless groups are not contiguous
                if j == 0 or SHAPE.group_size % 64 > 0 or w_ptrs[4] is not None:
                    scales, zeros = _scales_of_inputs(w_ptrs, row, k, is_row, SHAPE)
                acc = tl.dot(((w - zeros) * scales).to(x.dtype), x.T, acc, input_precision="ieee")
        if IS_ONE_GROUP:
            acc += part * scales
    return acc


@triton.jit
def times_row_scales(y, w_ptrs, row, is_row):
    """Multiply y [tile_n, tile_m] by the factors of the weight's rows, if there are any."""
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
    acc = tl.zeros([SHAPE.tile_n, SHAPE.tile_m], tl.float32)
    acc = add_packed_product(acc, x_ptr, m, m < M, w_ptrs, n, n < N, first, end, SHAPE)
    acc = times_row_scales(acc, w_ptrs, n, n < N)
    out = out_ptr + (split * M + m[:, None]) * N + n[None, :]
    tl.store(out, acc.T.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


@dependent_kernel()
@triton.jit
def _dequantize_packed_kernel(w_ptrs, out_ptr, N, SHAPE: tl.constexpr, PDL: tl.constexpr):
    # A program converts tile_words words of tile_n rows.
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0) * SHAPE.tile_n + tl.arange(0, SHAPE.tile_n)
    word = tl.program_id(1) * SHAPE.tile_words + tl.arange(0, SHAPE.tile_words)
    is_row, first_k = row < N, word // 8 * 64 + word % 8
    words_at = w_ptrs[0] + row.to(tl.int64)[:, None] * SHAPE.words + word[None, :]
    words = tl.load(words_at, is_row[:, None] & (word < SHAPE.words)[None, :], 0)
    for j in tl.static_range(8):
        k = first_k + 8 * j
        if j == 0 or SHAPE.group_size % 64 > 0 or w_ptrs[4] is not None:
            scales, zeros = _scales_of_inputs(w_ptrs, row, k, is_row, SHAPE)
        w = times_row_scales((_decode((words >> 4 * j) & 15, SHAPE.is_e2m1) - zeros) * scales, w_ptrs, row, is_row)
        out = out_ptr + row.to(tl.int64)[:, None] * SHAPE.k + k[None, :]
        tl.store(out, w.to(out_ptr.dtype.element_ty), is_row[:, None] & (k < SHAPE.k)[None, :])


def packed_operands(weight, tile_n: int, tile_m: int, tile_words: int, stages: int, split_k: int = 1) -> tuple:
    """Return the pointers and the PackedShape with which a weight is passed to a kernel."""
    words, scales, zeros, row_scales, group_ids = weight[:5]
    num_words, groups = words.shape[-1], scales.shape[-1]
    shape = PackedShape(
        *(weight.k, num_words, groups, ONE_GROUP if groups == 1 else weight.group_size),
        *(weight.codes == "e2m1", scales.dtype == torch.float8_e8m0fnu),
        triton.cdiv(num_words, split_k * tile_words) * tile_words,
        *(tile_n, tile_m, tile_words, stages),
    )
    scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    return (words, scales, zeros, row_scales, group_ids), shape


def packed_gemm(
    x: torch.Tensor, weight, split_k: int = 1, out: torch.Tensor | None = None, tile_m: int | None = None
) -> torch.Tensor:
    """Return parts [split_k, M, N] whose sum is x W^T, for x [M, K] and a Packed weight [N, K].

    All tensors are contiguous. `out` receives the result.
    """
    m, n = len(x), len(weight.words)
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=x.device) if out is None else out
    tile_m = tile_m or tile_m_of(m)
    # x takes more registers with more rows; float32, which only tests use, takes twice as many
    tile_n, stages = (64, 5) if tile_m <= 32 and x.dtype != torch.float32 else (64, 3)
    pointers, shape = packed_operands(weight, tile_n, tile_m, 16, stages, split_k)
    grid = triton.cdiv(n, tile_n), triton.cdiv(m, tile_m), split_k
    launch(_packed_gemm_kernel, grid, x.device)(x, pointers, out, m, n, SHAPE=shape, num_warps=4)
    return out


def tile_m_of(num_rows: int) -> int:
    return min(LARGE_TILE_M, max(SMALL_TILE_M, triton.next_power_of_2(num_rows)))


def best_packed_split_k(x, weight, max_split_k):
    num_rows = len(x)
    if not 0 < num_rows <= MAX_PACKED_ROWS:
        return 1
    num_tiles = triton.cdiv(len(weight.words), 64) * triton.cdiv(num_rows, tile_m_of(num_rows))
    return max(1, min(max_split_k, NUM_PROGRAMS * num_sms(x.device) // num_tiles))


def packed_linear(x, weight, bias=None, act=None, split_k=1, out=None):
    if not 0 < len(x) <= MAX_PACKED_ROWS:
        return NotImplemented
    y = packed_gemm(x.contiguous(), weight, split_k, out)
    if bias is not None:
        y += bias
    y = y if split_k > 1 else y[0]
    return y if act is None else act(y)


def dequantize_packed(weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a Packed weight [N, K] in `dtype`."""
    n = len(weight.words)
    out = torch.empty((n, weight.k), dtype=dtype, device=weight.device)
    pointers, shape = packed_operands(weight, 16, 0, 64, 0)
    grid = triton.cdiv(n, 16), triton.cdiv(shape.words, 64)
    launch(_dequantize_packed_kernel, grid, weight.device)(pointers, out, n, SHAPE=shape, num_warps=4)
    return out

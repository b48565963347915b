"""FP8 (e4m3) in kernels: conversion from and to it, and rows that share a scale.

Tensors of e4m3 are `torch.float8_e4m3fn` where the GPU converts it, from compute capability 8.9 on. Elsewhere kernels
take its bits as uint8 and convert them here: Triton has no e4m3 for older GPUs, and its interpreter rounds it wrongly.

A scale is a power of two, kept as its biased exponent (E8M0 of the OCP Microscaling formats). So multiplying by it is
exact, in any float dtype, and it takes one byte. It costs no accuracy: e4m3 is a float format itself, whose relative
error is the same for every scale that brings the values into its range.
"""

import triton
import triton.language as tl

# the biased exponents of 2**-32 and 2**31: attention adds exponents to scores and raises 2 to the sum, in float32
MIN_EXPONENT = tl.constexpr(95)
MAX_EXPONENT = tl.constexpr(158)


@triton.jit
def decode_e4m3(x, dtype: tl.constexpr):
    """e4m3, or its bits as uint8, -> dtype, exactly."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        # a float16 with these bits has an exponent that is 8 too small
        y = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), y).to(dtype)
    return x.to(dtype)


@triton.jit
def encode_e4m3(x, dtype: tl.constexpr):
    """float32 -> e4m3, as dtype float8e4nv or its bits as uint8: the nearest, ties to even; beyond 448 it is 448."""
    if dtype == tl.uint8:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # the biases are 127 and 7
        # the spacing of float32 at 2**14 is the spacing of subnormal numbers of e4m3, 2**-9
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        y = tl.where(magnitude < 0.015625, subnormal, normal)
        return (sign | tl.where(x == x, y, 0x7F)).to(tl.uint8)
    return x.to(dtype)


@triton.jit
def power_of_two(exponent):
    """The scale with this biased exponent, int32 -> float32; infinite for 255."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_rows(x, dtype: tl.constexpr):
    """Rows [R, D] -> e4m3 [R, D] as dtype, and the biased exponents of their scales [R] int32.

    A scale is the least that brings its row to at most 448, within bounds. It is 255 for a row with NaN or infinity.
    """
    x = x.to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # order as the magnitudes, and NaN is above them
    exponent = ((largest + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2**8, and the sum carries above a mantissa of 1.75
    exponent = tl.minimum(tl.maximum(exponent, MIN_EXPONENT), MAX_EXPONENT)
    y = encode_e4m3(x * power_of_two(254 - exponent)[:, None], dtype)
    return y, tl.where(largest < 0x7F800000, exponent, 255)


@triton.jit
def store_row(x, row_ptr, scale_ptr, slot):
    """Quantize a row [1, D] and store it and its scale, unless slot is -1.

    Returned is what can be read then: [1, D] float32, still to be scaled, and the biased exponent of the scale [1].
    """
    y, exponent = quantize_rows(x, row_ptr.dtype.element_ty)
    i = tl.arange(0, 1)
    tl.store(row_ptr, y, slot + 0 * tl.arange(0, x.shape[1])[None, :] >= 0)
    tl.store(scale_ptr + i, exponent.to(tl.uint8), slot + i >= 0)
    return decode_e4m3(y, tl.float32), exponent


@triton.jit
def load_scales(k_scale_ptr, v_scale_ptr, inside):
    """Of the keys and values of a tile [N] with N pointers: scales of keys; exponents and inverse scales of values.

    The scale of a value is a power of two, 2**e, so it needs no product: p * 2**e = 2 ** (score + e - m), where e is
    added to the scores before their maximum m is taken. Then p lies between 0 and 1 however small the values are, and
    p in float16 keeps its accuracy. The sum of the softmax takes p * 2**-e.
    """
    # loads without a mask can be vectorized: stale scales beyond the sequence's end are replaced here
    k_exponent = tl.where(inside, tl.load(k_scale_ptr).to(tl.int32), 127)
    v_exponent = tl.where(inside, tl.load(v_scale_ptr).to(tl.int32), 127)
    return power_of_two(k_exponent), (v_exponent - 127).to(tl.float32), power_of_two(254 - v_exponent)


@triton.jit
def as_fp8_partner(x):
    """The other operand of products with e4m3: float16 in place of bfloat16.

    The hardware converts e4m3 to float16, and to bfloat16 by way of that and float32. A query is exact in both dtypes:
    float16 has more digits, and its range is only exceeded far from what norms and projections give.
    """
    if x.dtype == tl.bfloat16:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x

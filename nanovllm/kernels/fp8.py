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

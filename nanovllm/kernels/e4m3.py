"""Converts numbers to and from FP8 (e4m3) in kernels, and quantizes rows of numbers with one scale per row.

GPUs of compute capability 8.9 or higher convert `torch.float8_e4m3fn` in hardware. On other devices, tensors contain
the bits of e4m3 values as uint8, and the functions in this file convert the bits. Triton has no e4m3 for older GPUs,
and its interpreter rounds e4m3 wrongly.

The scale of a row is the row's largest magnitude divided by 448 (the largest e4m3 value), then rounded to bfloat16. The
largest value of a row is therefore almost exact. Other values have a relative error of up to 1/16, or more if they are
close to 0.
"""

import triton
import triton.language as tl

# no scale is 0, because attention takes the logarithm of scales
MIN_SCALE = tl.constexpr(2.0**-32)
ONES = tl.constexpr(0x3F803F80)  # a pair of bfloat16 scales, both 1


@triton.jit
def decode_e4m3(x, dtype: tl.constexpr):
    """Convert e4m3 values, or their bits as uint8, to `dtype` without rounding."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        # a float16 with these bits has an exponent that is 8 too small
        y = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), y)
    return x.to(dtype)


@triton.jit
def decode_e4m3_pairs(pairs, stored_dtype: tl.constexpr, dtype: tl.constexpr):
    """Unpack uint16 words, each with two e4m3 values.

    Return two tensors of `dtype`: the first value of each word, and the second value of each word.
    """
    if stored_dtype == tl.uint8 or dtype != tl.float16:
        first = (pairs & 0xFF).to(tl.uint8).to(stored_dtype, bitcast=True)
        second = (pairs >> 8).to(tl.uint8).to(stored_dtype, bitcast=True)
        first, second = decode_e4m3(first, dtype), decode_e4m3(second, dtype)
    else:  # `prmt` groups the first and the second numbers of two pairs, so that `cvt` converts two at a time
        asm: tl.constexpr = """
        {
            .reg .b32 both;
            .reg .b16 firsts, seconds;
            prmt.b32 both, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, both;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
        }
        """
        first, second = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return first, second


@triton.jit
def encode_e4m3(x, dtype: tl.constexpr):
    """Convert float32 to float8e4nv, or to the bits of float8e4nv in uint8.

    Round to nearest even, and saturate at 448.
    """
    if dtype == tl.uint8:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # exponent biases are 127 and 7
        # the spacing of float32 at 2**14 is the spacing of subnormal numbers of e4m3, 2**-9
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        y = tl.where(magnitude < 0.015625, subnormal, normal)
        encoded = (sign | tl.where(x == x, y, 0x7F)).to(tl.uint8)
    else:
        encoded = x.to(dtype)
    return encoded


@triton.jit
def encode_rows(x, dtype: tl.constexpr):
    """Quantize rows x [R, D] to e4m3, stored as `dtype`. Return the quantized rows and their scales [R].

    The scales are float32 values that bfloat16 represents exactly. A row that contains NaN or infinity gets an infinite
    scale, so the row never decodes to finite values.
    """
    x = x.to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # integers sort like magnitudes, with NaN at the top
    bits = tl.maximum(largest.to(tl.float32, bitcast=True) * (1 / 448), MIN_SCALE).to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)  # nearest bfloat16
    scale = tl.where(largest < 0x7F800000, scale, float("inf"))
    return encode_e4m3(x * tl.div_rn(1.0, scale)[:, None], dtype), scale


@triton.jit
def bfloat16_bits(x):
    """Return the bfloat16 bits of float32 values as int16. bfloat16 must represent the values exactly."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def store_row(x, row_ptr, scale_ptr, slot):
    """Quantize a row x [1, D]. Unless `slot` is -1, store the result and its scale (bfloat16 bits in int16).

    Return the quantized values [1, D] as float32, and the scale [1]. The values are not multiplied by the scale yet.
    """
    y, scale = encode_rows(x, row_ptr.dtype.element_ty)
    i = tl.arange(0, 1)
    tl.store(row_ptr, y, slot + 0 * tl.arange(0, x.shape[1])[None, :] >= 0)
    tl.store(scale_ptr + i, bfloat16_bits(scale), slot + i >= 0)
    return decode_e4m3(y, tl.float32), scale


@triton.jit
def unpack_scales(pairs, stored_dtype: tl.constexpr):
    """Unpack int32 words [N] that contain the bfloat16 scales of a key and of its value.

    Return the key scales, and log2 of the value scales, both float32 [N]. Attention adds log2(scale) to the scores
    instead of multiplying values by their scales. Let m be the maximum of score + log2(scale). Then the weight p = 2 **
    (score + log2(scale) - m) includes the scale. The weight lies between 0 and 1 for values of any size, so float16
    represents it accurately. The denominator of the softmax is the sum of p / scale.
    """
    k_scale = (pairs << 16).to(tl.float32, bitcast=True)
    v_scale = (pairs & -0x10000).to(tl.float32, bitcast=True)
    if stored_dtype == tl.uint8:
        v_log2_scale = tl.log2(v_scale)
    else:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"  # tl.log2 takes 15 instructions
        v_log2_scale = tl.inline_asm_elementwise(asm, "=f,f", [v_scale], tl.float32, is_pure=True, pack=1)
    return k_scale, v_log2_scale


@triton.jit
def as_fp8_partner(x):
    """Convert bfloat16 queries to float16, so that they can be multiplied by e4m3 keys.

    The hardware can convert e4m3 to bfloat16 only via float16 and float32. float16 is more precise than bfloat16. The
    outputs of norms and projections are far below the largest float16 number.
    """
    if x.dtype == tl.bfloat16:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x

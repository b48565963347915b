"""The order of a row's tokens: by descending logit, then by ascending id, as defined in layers/sampler.py.

Tokens are ordered by descending key: the logit as an integer in the upper 32 bits, and the inverted id in the lower 32
bits.
"""

import triton
import triton.language as tl

LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_bits(bits):
    """Map the bits of float32 values to int32 values in the same order. A second call restores the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def token_key(logit, token_id):
    logit = tl.where(logit == 0, 0.0, logit)  # -0 equals 0
    order = ordered_bits(logit.to(tl.int32, bitcast=True)).to(tl.int64)
    return (order << 32) | (~token_id).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def logit_and_id(key):
    return ordered_bits((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True), ~key.to(tl.int32)

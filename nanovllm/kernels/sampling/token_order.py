"""The order of a row's tokens, by logit and, among equals, by id; layers/sampler.py defines it.

A token's key has the logit, as an integer, in its upper 32 bits and the inverted id in its lower ones. Tokens in
descending order of their keys are those of the largest logits first, and equal ones in ascending order of ids.
"""

import triton
import triton.language as tl

LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_bits(bits):
    """The bits of float32 numbers to int32 that have the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def token_key(logit, token_id):
    logit = tl.where(logit == 0, 0.0, logit)  # -0 equals 0
    order = ordered_bits(logit.to(tl.int32, bitcast=True)).to(tl.int64)
    return (order << 32) | (~token_id).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def logit_and_id(key):
    return ordered_bits((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True), ~key.to(tl.int32)

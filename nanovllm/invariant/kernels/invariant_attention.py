"""Attention whose results depend in no bit on the batch, on chunks, or on how keys are split over programs.

The kernels of chunks (invariant_prefill.py) and of decodes (invariant_decode.py) have the arithmetic of this file for
each query. Keys are added up in tiles, and tiles in segments, which begin at absolute positions. Each segment has sums
of its own, which are added up in order: so a query's segments may be computed by one program, or by several
(flash-decoding).

That products are the same in tiles of any number of rows, transposed or not, is a property of Hopper's instructions for
64 rows (wgmma; mma.sync was seen to round otherwise). tests/test_invariant_kernels.py checks it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.split_sequence import NO_KEYS
from nanovllm.kernels.e4m3 import unpack_scales

# keys, a multiple of every tile: the fewer, the more programs a sequence has, and the more often sums are added up
SEGMENT = tl.constexpr(512)


@triton.jit
def fma(x, factor, y):
    """x * factor + y, rounded once. Whether a compiler fuses a multiplication and an addition is otherwise up to it."""
    return tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(y, x.shape))


@triton.jit
def add_tile(sums, scores, v, scale, pairs, visible, stored_dtype: tl.constexpr, KEYS: tl.constexpr):
    """Add a tile of keys to the sums: of weighted values and of weights, relative to the largest score.

    Scores are products of queries and keys, whose dimension is KEYS: 1, or 0 where all is transposed. `visible` is None
    if all keys are; else values of others are zeros. In FP8 `pairs` are the scales of keys and values. A product with
    ones adds up the weights, in an order that does not depend on which threads have them.
    """
    acc, total, largest = sums
    # over small scales of values, weights may exceed the range of float16
    DTYPE: tl.constexpr = tl.bfloat16 if pairs is not None and v.dtype == tl.float16 else v.dtype
    factor = tl.full([1, 1], 1.0, tl.float32)
    if pairs is None:
        factor = factor * scale
    else:
        k_scale, v_log2_scale = unpack_scales(pairs, stored_dtype)
        k_scale, v_log2_scale = tl.expand_dims(k_scale * scale, 1 - KEYS), tl.expand_dims(v_log2_scale, 1 - KEYS)
        scores = fma(scores, k_scale, v_log2_scale)
    seen = scores
    if visible is not None:
        seen = tl.where(visible, scores, NO_KEYS)
    new_largest = tl.maximum(largest, tl.max(seen, KEYS, keep_dims=True) * factor)
    weights = tl.exp2(fma(scores, factor, -new_largest))
    if visible is not None:
        weights = tl.where(visible, weights, 0.0)
    shrinks = tl.exp2(largest - new_largest)
    p = weights.to(v.dtype)
    if pairs is not None:
        weights = weights * tl.exp2(-v_log2_scale)
    if KEYS == 1:
        acc = tl.dot(p, v, acc * shrinks, input_precision="ieee")
        ones = tl.full([v.shape[0], 16], 1.0, DTYPE)
        total = tl.dot(weights.to(DTYPE), ones, total * shrinks, input_precision="ieee")
    else:
        acc = tl.dot(v.T, p, acc * shrinks, input_precision="ieee")
        ones = tl.full([64, v.shape[0]], 1.0, DTYPE)
        total = tl.dot(ones, weights.to(DTYPE), total * shrinks, input_precision="ieee")
    return acc, total, new_largest


@triton.jit
def segment_of(sums, KEYS: tl.constexpr):
    """The sums after the last tile, of which those of weights are all the same."""
    acc, total, largest = sums
    return acc, tl.max(total, KEYS, keep_dims=True), largest


@triton.jit
def add_segment(done, segment):
    """The sums of some segments and of the next one."""
    acc_before, total_before, largest_before = done
    acc, total, largest = segment
    new_largest = tl.maximum(largest_before, largest)
    shrinks, factor = tl.exp2(largest_before - new_largest), tl.exp2(largest - new_largest)
    return fma(acc, factor, acc_before * shrinks), fma(total, factor, total_before * shrinks), new_largest


@triton.jit
def store_attended(out_ptr, at, done, mask):
    acc, total, _ = done
    tl.store(out_ptr + at, (acc / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty), mask)


def tile_sizes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Query rows of a tile, and keys, also of one of decodes."""
    return (64 if dtype == torch.float32 or head_dim > 128 else 128), 64

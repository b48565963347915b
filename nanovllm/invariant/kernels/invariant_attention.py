"""Computes attention in which no bit of a result depends on the batch, on chunks, or on how programs divide the keys.

Prefill (invariant_prefill.py) and decode (invariant_decode.py) use the arithmetic of this file. A segment is a range of
tiles of keys. Tiles and segments begin at fixed positions. The tiles of a segment are added in order. Finally, the
segments of a query are added in order. The result is therefore the same whether one program or several programs
(flash-decoding) compute the segments of a query.

The result of a matmul must not depend on the number of rows per tile, or on whether the tiles are transposed. Hopper's
instructions for 64 rows (wgmma) round in the same way in all tiles, which tests/test_invariant_kernels.py checks. The
older instruction `mma.sync` was observed to round differently.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import LOG2_E, tanh_of_scores
from nanovllm.kernels.attention.split_sequence import NO_KEYS
from nanovllm.kernels.e4m3 import unpack_scales

# keys per segment, a multiple of every tile size; smaller segments allow more programs, but need more additions of sums
SEGMENT = tl.constexpr(512)


@triton.jit
def fma(x, factor, y):
    """Return x * factor + y, which is always rounded exactly once.

    With plain operators, the compiler would decide how often to round.
    """
    return tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(y, x.shape))


@triton.jit
def add_tile(sums, scores, v, scale, pairs, visible, stored_dtype: tl.constexpr, KEYS: tl.constexpr, CAP: tl.constexpr):
    """Add a tile of keys to `sums`, which is (weighted values, weights, largest score so far).

    KEYS is the dimension of `scores` that belongs to the keys: 1, or 0 if the tiles are transposed. `visible` is `None`
    if all keys are visible. The values of hidden keys must be zero. In FP8, `pairs` contains the scales of keys and
    values. A matmul with ones adds the weights, so the order of additions does not depend on which threads hold the
    weights. CAP is the soft cap of the scores, or 0.
    """
    acc, total, largest = sums
    # weights are divided by the scales of values, and may exceed the range of float16 if the scales are small
    DTYPE: tl.constexpr = tl.bfloat16 if pairs is not None and v.dtype == tl.float16 else v.dtype
    factor = tl.full([1, 1], 1.0, tl.float32)
    if CAP != 0.0:
        cap_factor = factor * (CAP * LOG2_E)
    if pairs is None:
        factor = factor * scale
        if CAP != 0.0:
            scores, factor = tanh_of_scores(scores, scale, CAP), cap_factor
    else:
        k_scale, v_log2_scale = unpack_scales(pairs, stored_dtype)
        k_scale, v_log2_scale = tl.expand_dims(k_scale * scale, 1 - KEYS), tl.expand_dims(v_log2_scale, 1 - KEYS)
        if CAP != 0.0:
            scores, k_scale = tanh_of_scores(scores * k_scale, 1.0, CAP), cap_factor
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
    """Return the sums of a finished segment, with only one copy of the sum of weights of each query."""
    acc, total, largest = sums
    return acc, tl.max(total, KEYS, keep_dims=True), largest


@triton.jit
def add_segment(done, segment):
    """Add the sums of the next segment to the sums of all earlier segments."""
    acc_before, total_before, largest_before = done
    acc, total, largest = segment
    new_largest = tl.maximum(largest_before, largest)
    shrinks, factor = tl.exp2(largest_before - new_largest), tl.exp2(largest - new_largest)
    return fma(acc, factor, acc_before * shrinks), fma(total, factor, total_before * shrinks), new_largest


@triton.jit
def store_attended(out_ptr, at, done, mask, sinks_ptr, head):
    """Divide the sums of weighted values by the sums of weights, and store the quotients.

    If `sinks_ptr` is given, first add the sinks to the sums of weights. `head` contains the indices of heads. Each
    head has one sink.
    """
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        done = add_segment(done, (tl.zeros_like(done[0]), tl.full(done[1].shape, 1.0, tl.float32), sinks))
    acc, total, _ = done
    tl.store(out_ptr + at, (acc / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty), mask)


def tile_sizes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    return (64 if dtype == torch.float32 or head_dim > 128 else 128), 64

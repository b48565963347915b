"""A Hopper epilogue for hopper_product.py: q and k norms, rotary embedding, and cache store.

Each block of 128 outputs is one head. A thread holds both elements of a rotated pair. The epilogue computes in float32,
and rounds once.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.hopper.hopper_product import SUMS, product, quarters_of

# the layout of half a head for 16-byte stores; each row stays in the warp that has it in SUMS
_OF_THREAD, _OF_WARP = [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
ROWS = gl.constexpr(gl.DistributedLinearLayout(_OF_THREAD, _OF_WARP, [[16, 0], [32, 0]], [], [64, 64]))


@gluon.jit
def _norm_rope(x0, x1, weights, eps, cos, sin):
    """Normalize (if there are norm weights) and rotate one head of 64 tokens.

    The head's halves are x0 and x1, both [64, 64].
    """
    y0, y1 = x0, x1
    if weights is not None:
        y0, y1 = x0 * weights[0], x1 * weights[1]
    y0, y1 = y0 * cos - y1 * sin, y1 * cos + y0 * sin
    if weights is not None:
        inverse_rms = gl.rsqrt(gl.sum(x0 * x0 + x1 * x1, 1) / 128 + eps)[:, None]
        y0, y1 = y0 * inverse_rms, y1 * inverse_rms
    return y0, y1


@gluon.jit
def _store_head(y0, y1, at, is_stored):
    """Store the first half of a head at `at` [64, 64], and the second half directly after it."""
    gl.store(at, gl.convert_layout(y0.to(at.dtype.element_ty), ROWS), is_stored)
    gl.store(at + 64, gl.convert_layout(y1.to(at.dtype.element_ty), ROWS), is_stored)


@gluon.jit
def _store_heads(sums, out_ptrs, row, n, num_rows, W: gl.constexpr):
    """Run the epilogue on a pair of query heads, key heads or value heads."""
    quarters = quarters_of(sums)
    norm_rope_ptrs, q_ptr, k_ptr, v_ptr, heads, kv_heads = out_ptrs
    q_weight_ptr, k_weight_ptr, eps, cos_sin_ptr, slots_ptr = norm_rope_ptrs
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    slots = gl.load(slots_ptr + rows, rows < num_rows, -1)
    # the two heads go to rows of q, or to slots of the cache; -1: they are not stored
    out_ptr, weight_ptr, index, head, count = q_ptr, q_weight_ptr, gl.where(rows < num_rows, rows, -1), 2 * n, heads
    if head >= heads:
        out_ptr, weight_ptr, index, head, count = k_ptr, k_weight_ptr, slots, head - heads, kv_heads
        if head >= kv_heads:
            out_ptr, head = v_ptr, head - kv_heads
    d = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    at = (out_ptr + (index.to(gl.int64) * count + head) * 128)[:, None] + d[None, :]
    is_stored = (index >= 0)[:, None]
    if 2 * n < heads + kv_heads:
        i = gl.arange(0, 64, gl.SliceLayout(0, SUMS))
        token = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), num_rows - 1)
        cos_ptrs = cos_sin_ptr + (token.to(gl.int64) * 256)[:, None] + i[None, :]
        cos, sin = gl.load(cos_ptrs), gl.load(cos_ptrs + 192)  # the second half of the sines, which is not negated
        weights = None
        if q_weight_ptr is not None:
            weight_ptrs = (weight_ptr + i)[None, :]
            weights = gl.load(weight_ptrs).to(gl.float32), gl.load(weight_ptrs + 64).to(gl.float32)
        for j in gl.static_range(2):
            y0, y1 = _norm_rope(quarters[2 * j], quarters[2 * j + 1], weights, eps, cos, sin)
            _store_head(y0, y1, at + j * 128, is_stored)
    else:
        for j in gl.static_range(2):
            _store_head(quarters[2 * j], quarters[2 * j + 1], at + j * 128, is_stored)


def store_product(factors, qk_norm_rope, slot_mapping: torch.Tensor, cache) -> torch.Tensor:
    """Compute x W^T, then `norm_rope_and_store`.

    `factors` is (x, weight, scales). For 16-bit operands, `scales` is `None`. `head_dim` is 128. The number of query
    heads and the number of key-value heads are both even.
    """
    x, weight, scales = factors
    kv_heads = cache.k.shape[2]
    heads = len(weight) // 128 - 2 * kv_heads
    q = torch.empty((len(x), heads, 128), dtype=x.dtype, device=weight.device)
    out_ptrs = (*qk_norm_rope, slot_mapping), q, cache.k, cache.v, heads, kv_heads
    product(x, weight, scales, _store_heads, out_ptrs)
    return q

"""The gated delta rule for prompts (arXiv:2412.06464), with tensor core matmuls over chunks of CHUNK tokens.

There are four kernels:

1. The first kernel computes the convolution and the gates.
2. The second kernel computes everything that does not depend on states, for all chunks in parallel.
3. The third kernel computes the state before each chunk, one chunk after the other.
4. The fourth kernel computes the outputs and the gated norm, for all chunks in parallel.

The kernels exchange decays and betas in float32, and all other tensors in the model's dtype. A state stays in float32
from chunk to chunk, and is rounded only for matmuls, for the last kernel and for storage.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.delta_net.kernels.delta_net_inputs import keep_inputs, rule_inputs, silu
from nanovllm.delta_net.kernels.delta_net_operands import (
    Plan,
    Sequences,
    chunk_of,
    num_decode_rows,
    operands_of,
    pad_of,
    sequence_of,
)
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import has_tma, num_sms

CHUNK = tl.constexpr(64)
HEADS_EACH = 2  # value heads of a chunk that a program computes in order, loading the next head ahead


@triton.jit
def _inverse(system, IS_FLOAT32: tl.constexpr):
    """Invert a lower triangular matrix with ones on the diagonal.

    `system` [CHUNK, CHUNK] contains the part of the matrix below the diagonal. If A' is the inverse of A and C' is the
    inverse of C, the inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]. By this formula, each iteration doubles
    the size of the inverted blocks. Elements of 16 bits are precise enough for the inverse. Keys have norm 1, and betas
    and decays are at most 1, so no element exceeds 1.
    """
    DTYPE: tl.constexpr = tl.float32 if IS_FLOAT32 else tl.float16
    i = tl.arange(0, CHUNK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(tl.constexpr(6)):
        block = i >> level
        below = tl.where((block ^ 1)[:, None] == block[None, :], system, 0.0)
        if level > 0:
            around = inverse.to(DTYPE)
            # "ieee" takes much longer to compile
            below = tl.dot(around, below.to(DTYPE), input_precision="tf32x3").to(DTYPE)
            below = tl.dot(below, around, input_precision="tf32x3")
        inverse -= below
    return inverse


@triton.jit
def _of_chunk(ptr, stride, first, end, column, d, DIM: tl.constexpr):
    """Return pointers [CHUNK, d] to the rows of a chunk's tokens, and a mask of the elements that exist.

    A row has DIM elements, starting at `column`.
    """
    i, d = tl.arange(0, CHUNK)[:, None], d[None, :]
    return ptr + tl.cast(first, tl.int64) * stride + column + (i * stride + d), (first + i < end) & (d < DIM)


@triton.jit
def _load(ptr, stride, first, end, column, d, DIM: tl.constexpr):
    own, is_there = _of_chunk(ptr, stride, first, end, column, d, DIM)
    return tl.load(own, is_there, 0.0)


@triton.jit
def _store(ptr, stride, first, end, column, d, DIM: tl.constexpr, x):
    own, is_there = _of_chunk(ptr, stride, first, end, column, d, DIM)
    tl.store(own, x, is_there)


@triton.jit
def _state_at(states_ptr, seq, first, head, d, e, HEADS: tl.constexpr):
    """Return pointers to a head's state (stored transposed) at the beginning of a chunk."""
    place = (seq + first // CHUNK).to(tl.int64) * HEADS.num_values + head
    return states_ptr + place * (HEADS.key_dim * HEADS.value_dim) + (d[:, None] * HEADS.value_dim + e[None, :])


@triton.jit
def _load_gates(gates_ptr, t, end, first_head, EACH: tl.constexpr, HEADS: tl.constexpr):
    """Load the gates [CHUNK, EACH] of a chunk's tokens, for EACH value heads starting at `first_head`."""
    head = first_head + tl.arange(0, EACH)[None, :]
    is_there = (t < end)[:, None] & (head < HEADS.num_values)
    return tl.load(gates_ptr + t[:, None] * HEADS.num_values + head, is_there, 0.0)


@triton.jit
def _of_head(gates, n):
    return tl.sum(tl.where(tl.arange(0, gates.shape[1])[None, :] == n, gates, 0.0), 1)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs"])
def _chunks_kernel(rule_ptrs, seq_ptrs, num_seqs, PLAN: tl.constexpr, PDL: tl.constexpr):
    """Each program computes `tile` value heads of a chunk.

    Let T be the inverse of the triangular system. The kernel replaces v with T (beta v), and computes w = T (beta decay
    k). The next kernel subtracts w times the state from v, because the state already returns this part of v.
    """
    gdc_launch_and_wait(PDL)
    HEADS: tl.constexpr = PLAN.heads
    seq, chunk = chunk_of(seq_ptrs, num_seqs, tl.program_id(1), CHUNK, PLAN.seqs_pad)
    if seq >= num_seqs:
        return
    begin, end = sequence_of(seq_ptrs, seq, 0, PLAN)[:2]
    first = begin + chunk * CHUNK
    i, d, e = tl.arange(0, CHUNK), tl.arange(0, HEADS.key_pad), tl.arange(0, HEADS.value_pad)
    t = first + i
    is_before = (i[:, None] > i[None, :]) & (t < end)[:, None]
    first_head = tl.program_id(0) * PLAN.tile
    decays = _load_gates(rule_ptrs.decay, t, end, first_head, PLAN.tile, HEADS)
    betas = _load_gates(rule_ptrs.beta, t, end, first_head, PLAN.tile, HEADS)
    for head in tl.range(first_head, tl.minimum(first_head + PLAN.tile, HEADS.num_values), num_stages=PLAN.stages):
        own_key, own_value = head // HEADS.group * HEADS.key_dim, head * HEADS.value_dim
        k = _load(rule_ptrs.k, HEADS.keys, first, end, own_key, d, HEADS.key_dim)
        v = _load(rule_ptrs.v, HEADS.values, first, end, own_value, e, HEADS.value_dim)
        decay, beta = _of_head(decays, head - first_head), _of_head(betas, head - first_head)
        between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
        system = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
        inverse = _inverse(system, k.dtype == tl.float32)
        of_decay = (inverse * (beta * tl.exp(decay))[None, :]).to(k.dtype)
        w = tl.dot(of_decay, k, input_precision="ieee")
        _store(rule_ptrs.w, HEADS.num_values * HEADS.key_dim, first, end, head * HEADS.key_dim, d, HEADS.key_dim, w)
        of_beta = (inverse * beta[None, :]).to(k.dtype)
        v = tl.dot(of_beta, v, input_precision="ieee")
        _store(rule_ptrs.v, HEADS.values, first, end, own_value, e, HEADS.value_dim, v)


@dependent_kernel()
@triton.jit(do_not_specialize=["stride"])
def _states_kernel(x_rows, rule_ptrs, seq_ptrs, state_ptrs, stride, PLAN: tl.constexpr, PDL: tl.constexpr):
    """Each program updates `tile` rows of the state of one head of one sequence, chunk by chunk.

    The kernel replaces v with the error of the state: v minus w times the state.
    """
    gdc_launch_and_wait(PDL)
    HEADS: tl.constexpr = PLAN.heads
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end, read, written = sequence_of(seq_ptrs, seq, stride, PLAN)
    if begin >= end:
        return
    d, e = tl.arange(0, HEADS.key_pad), tile * PLAN.tile + tl.arange(0, PLAN.tile)
    of_state = (d < HEADS.key_dim)[:, None] & (e < HEADS.value_dim)[None, :]
    state_at = (head * HEADS.value_dim + e)[None, :] * HEADS.key_dim + d[:, None]
    own_state = state_ptrs.matrices + read * (HEADS.values * HEADS.key_dim) + state_at  # transposed
    state = tl.load(own_state, of_state, 0.0).to(tl.float32)
    own_key, own_value = head // HEADS.group * HEADS.key_dim, head * HEADS.value_dim
    for first in tl.range(begin, end, CHUNK, num_stages=PLAN.stages):
        w = _load(rule_ptrs.w, HEADS.num_values * HEADS.key_dim, first, end, head * HEADS.key_dim, d, HEADS.key_dim)
        k = _load(rule_ptrs.k, HEADS.keys, first, end, own_key, d, HEADS.key_dim)
        v = _load(rule_ptrs.v, HEADS.values, first, end, own_value, e, HEADS.value_dim)
        last = tl.load(rule_ptrs.decay + (tl.minimum(first + CHUNK, end) - 1) * HEADS.num_values + head)
        t = first + tl.arange(0, CHUNK)
        decay = tl.load(rule_ptrs.decay + t * HEADS.num_values + head, t < end, 0.0)
        before = state.to(k.dtype)
        tl.store(_state_at(rule_ptrs.states, seq, first, head, d, e, HEADS), before, of_state)
        errors = v - tl.dot(w, before, input_precision="ieee")
        _store(rule_ptrs.v, HEADS.values, first, end, own_value, e, HEADS.value_dim, errors)
        kept = (errors * tl.exp(last - decay)[:, None]).to(k.dtype)  # zeros after the last token
        state = tl.dot(tl.trans(k), kept, state * tl.exp(last), input_precision="ieee")
    tl.store(state_ptrs.matrices + written * (HEADS.values * HEADS.key_dim) + state_at, state, of_state)
    if tile == 0:
        source = x_rows, state_ptrs, read, begin, begin
        keep_inputs(source, written, head, end, end, PLAN)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs", "num_rows"])
def _outputs_kernel(
    x_rows, rule_ptrs, seq_ptrs, norm_ptrs, out_ptr, num_seqs, num_rows, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """Each program computes the outputs of one value head in one chunk, and the gated norm of the outputs.

    Each program also sets at most CHUNK rows after the last token to 0.
    """
    gdc_launch_and_wait(PDL)
    HEADS: tl.constexpr = PLAN.heads
    norm_ptr, eps = norm_ptrs
    i, d, e = tl.arange(0, CHUNK), tl.arange(0, HEADS.key_pad), tl.arange(0, HEADS.value_pad)
    head, index = tl.program_id(0), tl.program_id(1)
    own_key, own_value = head // HEADS.group * HEADS.key_dim, head * HEADS.value_dim
    num_tokens = tl.load(seq_ptrs.starts + num_decode_rows(seq_ptrs) + num_seqs)
    if index * CHUNK + CHUNK > num_tokens:
        own_out, is_row = _of_chunk(out_ptr, HEADS.values, index * CHUNK, num_rows, own_value, e, HEADS.value_dim)
        is_padding = is_row & (index * CHUNK + i >= num_tokens)[:, None]
        tl.store(own_out, tl.zeros(own_out.shape, out_ptr.dtype.element_ty), is_padding)
    seq, chunk = chunk_of(seq_ptrs, num_seqs, index, CHUNK, PLAN.seqs_pad)
    if seq >= num_seqs:
        return
    begin, end = sequence_of(seq_ptrs, seq, 0, PLAN)[:2]
    first = begin + chunk * CHUNK
    q = _load(rule_ptrs.q, HEADS.keys, first, end, own_key, d, HEADS.key_dim)
    k = _load(rule_ptrs.k, HEADS.keys, first, end, own_key, d, HEADS.key_dim)
    errors = _load(rule_ptrs.v, HEADS.values, first, end, own_value, e, HEADS.value_dim)
    z = _load(x_rows.qkvz, x_rows.stride, first, end, HEADS.channels + own_value, e, HEADS.value_dim).to(tl.float32)
    of_state = (d < HEADS.key_dim)[:, None] & (e < HEADS.value_dim)[None, :]
    before = tl.load(_state_at(rule_ptrs.states, seq, first, head, d, e, HEADS), of_state, 0.0)
    t = first + i
    decay = tl.load(rule_ptrs.decay + t * HEADS.num_values + head, t < end, 0.0)
    is_before = (i[:, None] >= i[None, :]) & (t < end)[:, None]
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    overlap = (tl.dot(q, tl.trans(k), input_precision="ieee") * between).to(k.dtype)
    y = tl.dot(q, before, input_precision="ieee") * tl.exp(decay)[:, None]
    y = tl.dot(overlap, errors, y, input_precision="ieee")
    weight = tl.load(norm_ptr + e, e < HEADS.value_dim, 0.0)[None, :]
    y *= tl.rsqrt(tl.sum(y * y, 1) / HEADS.value_dim + eps)[:, None] * weight
    _store(out_ptr, HEADS.values, first, end, own_value, e, HEADS.value_dim, y * silu(z))


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """Implement the operation `delta_net_chunks` of delta_net/gated_delta_net.py."""
    heads, x, state_tensors = operands = operands_of(qkvz, ba, layer, states)
    seqs, pad = Sequences(state_rows, count, starts), pad_of(num_seqs)
    plan = Plan(heads, CHUNK.value, seqs_pad=pad, is_summed=True)
    num_tokens, num_chunks = len(qkvz), triton.cdiv(len(qkvz), CHUNK.value) + num_seqs  # at most
    inputs = rule_inputs(operands, layer, seqs, num_seqs, plan, qkvz.dtype)._replace(
        w=qkvz.new_empty(num_tokens, heads.num_values * heads.key_dim),
        states=qkvz.new_empty(num_chunks, heads.values * heads.key_dim),
    )
    fits = has_tma(qkvz.device) and qkvz.dtype != torch.float32  # whether shared memory is large enough to load ahead
    each = min(HEADS_EACH, heads.num_values)
    launch(_chunks_kernel, (triton.cdiv(heads.num_values, each), num_chunks), qkvz.device)(
        inputs, seqs, num_seqs, PLAN=Plan(heads, each, seqs_pad=pad, stages=2 if fits else 1)
    )
    # if there are few states, each state is divided over more programs
    is_few = heads.num_values * num_seqs * triton.cdiv(heads.value_dim, 32) <= num_sms(qkvz.device)
    tile, stages = min(32 if is_few else 64, heads.value_pad), (3 if is_few else 2) if fits else 1
    launch(_states_kernel, (triton.cdiv(heads.value_dim, tile), heads.num_values, num_seqs), qkvz.device)(
        x, inputs, seqs, state_tensors, state_rows.stride(0), PLAN=Plan(heads, tile, stages=stages)
    )
    launch(_outputs_kernel, (heads.num_values, num_chunks), qkvz.device)(
        x, inputs, seqs, (layer.norm.weight, layer.eps), out, num_seqs, num_tokens, PLAN=plan
    )

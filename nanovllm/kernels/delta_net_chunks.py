"""Chunks of prompts by the gated delta rule (arXiv:2412.06464): matrix products of CHUNK tokens, with tensor cores.

Four kernels: convolution and gates; what can be computed of all chunks without their states; the states, from chunk to
chunk; what each chunk reads of the state before it, and gated norm, again of all chunks at the same time. In between,
numbers have the dtype of the model, decays float32. A state goes through a sequence in float32, and is rounded where it
is multiplied.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.delta_net_inputs import Sequences, chunk_of, of_chunks, rows_of, rule_inputs, shift_window, silu
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2
from nanovllm.kernels.devices import has_tma, num_sms

CHUNK = tl.constexpr(64)
HEADS_EACH = 2  # value heads of a chunk that a program takes one after the other, and loads ahead


@triton.jit
def _inverse(system, PRECISION: tl.constexpr):
    """Of the unit lower triangular matrix whose part below the diagonal is `system` [CHUNK, CHUNK].

    By blocks of twice the size each time: the inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]. As keys have
    norm 1, and betas and decays are at most 1, so are all numbers here, and 16 bits can hold them well.
    """
    DTYPE: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16
    THIS_PRECISION: tl.constexpr = "tf32x3" if PRECISION == "ieee" else PRECISION  # which compiles much faster
    i = tl.arange(0, CHUNK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(tl.constexpr(6)):
        block = i >> level
        below = tl.where((block ^ 1)[:, None] == block[None, :], system, 0.0)
        if level > 0:
            around = inverse.to(DTYPE)
            below = tl.dot(around, below.to(DTYPE), input_precision=THIS_PRECISION).to(DTYPE)
            below = tl.dot(below, around, input_precision=THIS_PRECISION)
        inverse -= below
    return inverse


@triton.jit
def _load_gates(gates_ptr, t, end, first_head, EACH: tl.constexpr, HEADS: tl.constexpr):
    """Of a chunk's tokens and EACH heads [CHUNK, EACH]."""
    head = first_head + tl.arange(0, EACH)[None, :]
    is_there = (t < end)[:, None] & (head < HEADS.num_values)
    return tl.load(gates_ptr + t[:, None] * HEADS.num_values + head, is_there, 0.0)


@triton.jit
def _of_head(gates, n):
    return tl.sum(tl.where(tl.arange(0, gates.shape[1])[None, :] == n, gates, 0.0), 1)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs"])
def _chunks_kernel(
    k_ptr,
    v_ptr,
    w_ptr,
    gate_ptrs,
    seq_ptrs,
    num_seqs,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a chunk and EACH value heads: with T the inverse of the triangular system, v becomes T (beta v),
    and w is T (beta decay k), by which what the state returns for the keys is corrected.
    """
    gdc_launch_and_wait(PDL)
    decay_ptr, beta_ptr = gate_ptrs
    starts_ptr, _ = of_chunks(seq_ptrs)
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEYS: tl.constexpr = HEADS.num_keys * HEADS.key_dim
    seq, first, _, end = chunk_of(starts_ptr, num_seqs, tl.program_id(1), CHUNK, SEQS_PAD)
    if seq >= num_seqs:
        return
    i = tl.arange(0, CHUNK)
    t = first + i
    is_there, row = (t < end)[:, None], tl.cast(first, tl.int64)
    is_before = (i[:, None] > i[None, :]) & is_there
    d = tl.arange(0, next_power_of_2(HEADS.key_dim))[None, :]
    e = tl.arange(0, next_power_of_2(HEADS.value_dim))[None, :]
    of_keys, of_values = is_there & (d < HEADS.key_dim), is_there & (e < HEADS.value_dim)
    first_head = tl.program_id(0) * EACH
    decays = _load_gates(decay_ptr, t, end, first_head, EACH, HEADS)
    betas = _load_gates(beta_ptr, t, end, first_head, EACH, HEADS)
    for head in tl.range(first_head, tl.minimum(first_head + EACH, NUM_VALUES), num_stages=STAGES):
        k = tl.load(k_ptr + row * KEYS + head // GROUP * HEADS.key_dim + (i[:, None] * KEYS + d), of_keys, 0.0)
        own_v = v_ptr + (row * NUM_VALUES + head) * HEADS.value_dim + (i[:, None] * (NUM_VALUES * HEADS.value_dim) + e)
        v = tl.load(own_v, of_values, 0.0)
        decay, beta = _of_head(decays, head - first_head), _of_head(betas, head - first_head)
        between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
        inverse = _inverse(system, PRECISION)
        of_decay = (inverse * (beta * tl.exp(decay))[None, :]).to(k.dtype)
        w = tl.dot(of_decay, k, input_precision=PRECISION)
        own_w = w_ptr + (row * NUM_VALUES + head) * HEADS.key_dim + (i[:, None] * (NUM_VALUES * HEADS.key_dim) + d)
        tl.store(own_w, w, of_keys)
        of_beta = (inverse * beta[None, :]).to(k.dtype)
        tl.store(own_v, tl.dot(of_beta, v, input_precision=PRECISION), of_values)


@triton.jit
def _state_at(states_ptr, seq, first, head, d, e, HEADS: tl.constexpr):
    """Where the state of a head before a chunk lies, transposed. No other chunk has the same place."""
    place = (seq + first // CHUNK).to(tl.int64) * HEADS.num_values + head
    return states_ptr + place * (HEADS.key_dim * HEADS.value_dim) + (d[:, None] * HEADS.value_dim + e[None, :])


@dependent_kernel()
@triton.jit(do_not_specialize=["rows_stride"])
def _states_kernel(
    x_rows,
    input_ptrs,
    seq_ptrs,
    state_ptrs,
    rows_stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a sequence, a value head and TILE of its values, from the first chunk to the last.

    The errors take the place of v. Windows are written here, as no program reads them any more.
    """
    gdc_launch_and_wait(PDL)
    k_ptr, v_ptr, w_ptr, decay_ptr, before_ptr = input_ptrs
    starts_ptr, rows_ptr = of_chunks(seq_ptrs)
    window_ptr, matrix_ptr, num_tokens_ptr = state_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    KEYS: tl.constexpr = HEADS.num_keys * KEY_DIM
    VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if begin >= end:
        return
    read = tl.load(rows_ptr + seq).to(tl.int64)
    written = tl.load(rows_ptr + rows_stride + seq).to(tl.int64)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, next_power_of_2(KEY_DIM))
    e = tile * TILE + tl.arange(0, TILE)
    in_key, in_value = d < KEY_DIM, e < VALUE_DIM
    of_state = in_key[:, None] & in_value[None, :]
    state_at = (head * VALUE_DIM + e)[None, :] * KEY_DIM + d[:, None]
    state = tl.load(matrix_ptr + read * (VALUES * KEY_DIM) + state_at, of_state, 0.0)  # transposed
    for first in tl.range(begin, end, CHUNK, num_stages=STAGES):
        t = first + i
        of_keys = (t < end)[:, None] & in_key[None, :]
        of_values = (t < end)[:, None] & in_value[None, :]
        row = tl.cast(first, tl.int64)
        own_v = v_ptr + row * VALUES + (i[:, None] * VALUES + (head * VALUE_DIM + e)[None, :])
        w_at = i[:, None] * (NUM_VALUES * KEY_DIM) + (head * KEY_DIM + d)[None, :]
        w = tl.load(w_ptr + row * (NUM_VALUES * KEY_DIM) + w_at, of_keys, 0.0)
        key_at = i[:, None] * KEYS + (head // GROUP * KEY_DIM + d)[None, :]
        k = tl.load(k_ptr + row * KEYS + key_at, of_keys, 0.0)
        v = tl.load(own_v, of_values, 0.0)
        last = tl.load(decay_ptr + (tl.minimum(first + CHUNK, end) - 1) * NUM_VALUES + head)
        decay = tl.load(decay_ptr + t * NUM_VALUES + head, t < end, 0.0)
        before = state.to(k.dtype)
        tl.store(_state_at(before_ptr, seq, first, head, d, e, HEADS), before, of_state)
        errors = v - tl.dot(w, before, input_precision=PRECISION)
        tl.store(own_v, errors, of_values)
        kept = (errors * tl.exp(last - decay)[:, None]).to(k.dtype)  # zeros after the last token
        state = tl.dot(tl.trans(k), kept, state * tl.exp(last), input_precision=PRECISION)
    tl.store(matrix_ptr + written * (VALUES * KEY_DIM) + state_at, state, of_state)
    window = (HEADS.conv_size - 1) * CHANNELS
    inputs = x_rows, None, window_ptr + read * window
    written_window = window_ptr + written * window
    # windows: of the own values, and those of the key head by the first program of its group
    shift_window(inputs, written_window, begin, begin, end, 2 * KEYS + head * VALUE_DIM + e, in_value, HEADS)
    is_first = in_key & (head % GROUP + tile + 0 * d == 0)  # a vector: the interpreter takes no scalar in a mask
    channel = head // GROUP * KEY_DIM + d
    shift_window(inputs, written_window, begin, begin, end, channel, is_first, HEADS)
    shift_window(inputs, written_window, begin, begin, end, KEYS + channel, is_first, HEADS)
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr + read) + end - begin
        if head + tile == 0:
            tl.store(num_tokens_ptr + written, num_tokens)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs", "num_rows"])
def _outputs_kernel(
    x_rows,
    input_ptrs,
    seq_ptrs,
    norm_ptr,
    out_ptr,
    num_seqs,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a chunk and a value head: what is read of the state before it and of its own errors, and norm.

    The rows after the last token become 0: as many as a chunk has, by each program.
    """
    gdc_launch_and_wait(PDL)
    x_ptr, x_stride = x_rows
    q_ptr, k_ptr, errors_ptr, decay_ptr, before_ptr = input_ptrs
    starts_ptr, _ = of_chunks(seq_ptrs)
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    KEYS: tl.constexpr = HEADS.num_keys * KEY_DIM
    VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, next_power_of_2(KEY_DIM))
    e = tl.arange(0, next_power_of_2(VALUE_DIM))
    in_key, in_value = (d < KEY_DIM)[None, :], (e < VALUE_DIM)[None, :]
    head = tl.program_id(0)
    num_tokens = tl.load(starts_ptr + num_seqs)
    if tl.program_id(1) * CHUNK + CHUNK > num_tokens:
        t = (tl.program_id(1) * CHUNK + i)[:, None]
        zeros = tl.zeros([CHUNK, e.shape[0]], out_ptr.dtype.element_ty)
        is_padding = (t >= num_tokens) & (t < num_rows) & in_value
        tl.store(out_ptr + t.to(tl.int64) * VALUES + head * VALUE_DIM + e[None, :], zeros, is_padding)
    seq, first, _, end = chunk_of(starts_ptr, num_seqs, tl.program_id(1), CHUNK, SEQS_PAD)
    if seq >= num_seqs:
        return
    t = first + i
    is_there, row = (t < end)[:, None], tl.cast(first, tl.int64)
    of_keys, of_values, of_state = is_there & in_key, is_there & in_value, (d < KEY_DIM)[:, None] & in_value
    key_at = row * KEYS + head // GROUP * KEY_DIM + (i[:, None] * KEYS + d[None, :])
    value_at = row * VALUES + head * VALUE_DIM + (i[:, None] * VALUES + e[None, :])
    q = tl.load(q_ptr + key_at, of_keys, 0.0)
    k = tl.load(k_ptr + key_at, of_keys, 0.0)
    before = tl.load(_state_at(before_ptr, seq, first, head, d, e, HEADS), of_state, 0.0)
    errors = tl.load(errors_ptr + value_at, of_values, 0.0)
    z_at = row * x_stride + CHANNELS + head * VALUE_DIM + (i[:, None] * x_stride + e[None, :])
    z = tl.load(x_ptr + z_at, of_values, 0.0).to(tl.float32)
    decay = tl.load(decay_ptr + t * NUM_VALUES + head, t < end, 0.0)
    is_before = (i[:, None] >= i[None, :]) & is_there
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    overlap = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between).to(k.dtype)
    y = tl.dot(q, before, input_precision=PRECISION) * tl.exp(decay)[:, None]
    y = tl.dot(overlap, errors, y, input_precision=PRECISION)
    weight = tl.load(norm_ptr + e, e < VALUE_DIM, 0.0)[None, :]
    y *= tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None] * weight
    tl.store(out_ptr + value_at, y * silu(z), of_values)


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """As its definition in layers/gated_delta_net.py."""
    (windows, matrices), kept, heads, device = states.tensors, states.kept_drafts, layer.heads, qkvz.device
    num_tokens, of_seqs = len(qkvz), (starts, state_rows, count)
    sequences, num_chunks = Sequences(of_seqs, num_seqs), triton.cdiv(num_tokens, CHUNK.value) + num_seqs  # at most
    q, k, v, *gates = rule_inputs(qkvz, ba, layer, states, sequences, qkvz.dtype, CHUNK.value, True)
    w = qkvz.new_empty(num_tokens, heads.num_values * heads.key_dim)
    before = qkvz.new_empty(num_chunks, heads.num_values * heads.key_dim * heads.value_dim)  # states
    is_float32 = qkvz.dtype == torch.float32
    fits = has_tma(device) and not is_float32  # into shared memory, what is loaded ahead
    each = min(HEADS_EACH, next_power_of_2(heads.num_values))
    constants = dict(HEADS=heads, PRECISION="ieee" if is_float32 else "tf32")
    launch(_chunks_kernel, (triton.cdiv(heads.num_values, each), num_chunks), device)(
        *(k, v, w, tuple(gates), of_seqs, num_seqs),
        **constants,
        EACH=each,
        STAGES=2 if fits else 1,
        SEQS_PAD=sequences.pad,
    )
    # a state is divided over more programs where they are few
    is_few = heads.num_values * num_seqs * triton.cdiv(heads.value_dim, 32) <= num_sms(device)
    tile = min(32 if is_few else 64, next_power_of_2(heads.value_dim))
    launch(_states_kernel, (triton.cdiv(heads.value_dim, tile), heads.num_values, num_seqs), device)(
        *(rows_of(qkvz), (k, v, w, gates[0], before), of_seqs, (windows, matrices, kept and kept.num_tokens)),
        state_rows.stride(0),
        **constants,
        TILE=tile,
        STAGES=(3 if is_few else 2) if fits else 1,
    )
    launch(_outputs_kernel, (heads.num_values, num_chunks), device)(
        *(rows_of(qkvz), (q, k, v, gates[0], before), of_seqs, layer.norm.weight, out, num_seqs, num_tokens, layer.eps),
        **constants,
        SEQS_PAD=sequences.pad,
    )

"""Chunks of prompts by the gated delta rule (arXiv:2412.06464): matrix products of CHUNK tokens, with tensor cores.

Four kernels: convolution and gates; what can be computed of all chunks at the same time; the states, from chunk to
chunk; gated norm. In between, numbers have the dtype of the model, decays and states float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.delta_net import _silu
from nanovllm.kernels.delta_net_inputs import Sequences, chunk_of, of_chunks, rule_inputs, shift_window
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, has_tma, launch, next_power_of_2

CHUNK = tl.constexpr(64)
VALUE_TILE = 32  # rows of a state that a program takes


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
    SEQS_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a chunk and a value head: with T the inverse of the triangular system, v becomes T (beta v), and
    w is T (beta decay k), by which what the state returns for the keys is corrected.
    """
    gdc_launch_and_wait(PDL)
    decay_ptr, beta_ptr = gate_ptrs
    starts_ptr, _ = of_chunks(seq_ptrs)
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEYS: tl.constexpr = HEADS.num_keys * HEADS.key_dim
    seq, first, _, end = chunk_of(starts_ptr, num_seqs, tl.program_id(0), CHUNK, SEQS_PAD)
    if seq >= num_seqs:
        return
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    t = first + i
    d = tl.arange(0, next_power_of_2(HEADS.key_dim))
    e = tl.arange(0, next_power_of_2(HEADS.value_dim))
    of_keys = (t < end)[:, None] & (d < HEADS.key_dim)[None, :]
    of_values = (t < end)[:, None] & (e < HEADS.value_dim)[None, :]
    key_at = t[:, None].to(tl.int64) * KEYS + (head // GROUP * HEADS.key_dim + d)[None, :]
    k = tl.load(k_ptr + key_at, of_keys, 0.0)
    decay = tl.load(decay_ptr + t * NUM_VALUES + head, t < end, 0.0)
    beta = tl.load(beta_ptr + t * NUM_VALUES + head, t < end, 0.0)
    # the transpose of the system, so that its rows are summed up as columns
    is_before = (i[:, None] < i[None, :]) & (t < end)[None, :]
    between = tl.exp(tl.where(is_before, decay[None, :] - decay[:, None], float("-inf")))
    overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[None, :]
    inverse = tl.zeros([CHUNK, CHUNK], tl.float32)
    for row in range(CHUNK):
        of_row = tl.sum(tl.where(i[None, :] == row, overlap, 0.0), 1)
        solved = tl.where(i == row, 1.0, 0.0) - tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == row, solved[None, :], inverse)
    value_at = t[:, None].to(tl.int64) * (NUM_VALUES * HEADS.value_dim) + (head * HEADS.value_dim + e)[None, :]
    v = tl.load(v_ptr + value_at, of_values, 0.0)
    of_beta = (inverse * beta[None, :]).to(k.dtype)
    tl.store(v_ptr + value_at, tl.dot(of_beta, v, input_precision=PRECISION), of_values)
    of_decay = (inverse * (beta * tl.exp(decay))[None, :]).to(k.dtype)
    w_at = t[:, None].to(tl.int64) * (NUM_VALUES * HEADS.key_dim) + (head * HEADS.key_dim + d)[None, :]
    tl.store(w_ptr + w_at, tl.dot(of_decay, k, input_precision=PRECISION), of_keys)


@dependent_kernel()
@triton.jit(do_not_specialize=["rows_stride"])
def _states_kernel(
    x_ptr,
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

    What is read with the queries takes the place of v. Windows are written here, as no program reads them any more.
    """
    gdc_launch_and_wait(PDL)
    q_ptr, k_ptr, v_ptr, w_ptr, decay_ptr = input_ptrs
    starts_ptr, rows_ptr = of_chunks(seq_ptrs)
    window_ptr, matrix_ptr, num_tokens_ptr = state_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    KEYS: tl.constexpr = HEADS.num_keys * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + NUM_VALUES * VALUE_DIM
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
    of_state = in_value[:, None] & in_key[None, :]
    state_at = (head * VALUE_DIM + e)[:, None] * KEY_DIM + d[None, :]
    state = tl.load(matrix_ptr + read * (NUM_VALUES * VALUE_DIM * KEY_DIM) + state_at, of_state, 0.0)
    for first in tl.range(begin, end, CHUNK, num_stages=STAGES):
        t = first + i
        of_keys = (t < end)[:, None] & in_key[None, :]
        of_values = (t < end)[:, None] & in_value[None, :]
        key_at = t[:, None].to(tl.int64) * KEYS + (head // GROUP * KEY_DIM + d)[None, :]
        w_at = t[:, None].to(tl.int64) * (NUM_VALUES * KEY_DIM) + (head * KEY_DIM + d)[None, :]
        value_at = t[:, None].to(tl.int64) * (NUM_VALUES * VALUE_DIM) + (head * VALUE_DIM + e)[None, :]
        q = tl.load(q_ptr + key_at, of_keys, 0.0)
        k = tl.load(k_ptr + key_at, of_keys, 0.0)
        w = tl.load(w_ptr + w_at, of_keys, 0.0)
        v = tl.load(v_ptr + value_at, of_values, 0.0)
        last = tl.load(decay_ptr + (tl.minimum(first + CHUNK, end) - 1) * NUM_VALUES + head)
        decay = tl.load(decay_ptr + t * NUM_VALUES + head, t < end, 0.0)
        before = tl.trans(state).to(k.dtype)  # [key_dim, TILE]
        errors = (v - tl.dot(w, before, input_precision=PRECISION)).to(k.dtype)
        is_before = (i[:, None] >= i[None, :]) & (t < end)[:, None]
        between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
        overlap = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between).to(k.dtype)
        out = tl.dot(q, before, input_precision=PRECISION) * tl.exp(decay)[:, None]
        out += tl.dot(overlap, errors, input_precision=PRECISION)
        tl.store(v_ptr + value_at, out, of_values)
        remains = tl.where(t < end, tl.exp(last - decay), 0.0)
        kept = (k * remains[:, None]).to(k.dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(errors), kept, input_precision=PRECISION)
    tl.store(matrix_ptr + written * (NUM_VALUES * VALUE_DIM * KEY_DIM) + state_at, state, of_state)
    window = (HEADS.conv_size - 1) * CHANNELS
    inputs = x_ptr, None, window_ptr + read * window
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
@triton.jit(do_not_specialize=["num_seqs"])
def _gated_norm_kernel(
    y_ptr, x_ptr, norm_ptr, out_ptr, seq_ptrs, num_seqs, eps, CHANNELS, HEADS: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_and_wait(PDL)
    starts_ptr, _ = of_chunks(seq_ptrs)
    NUM_VALUES: tl.constexpr = HEADS.num_values
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(starts_ptr):
        return
    head = tl.arange(0, next_power_of_2(NUM_VALUES))[:, None]
    e = tl.arange(0, next_power_of_2(VALUE_DIM))[None, :]
    inside = (head < NUM_VALUES) & (e < VALUE_DIM)
    is_there = inside & (token + 0 * e < tl.load(starts_ptr + num_seqs))
    at = token * (NUM_VALUES * VALUE_DIM) + head * VALUE_DIM + e
    y = tl.load(y_ptr + at, is_there, 0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None] * tl.load(norm_ptr + e, e < VALUE_DIM, 0.0)
    z = tl.load(x_ptr + at + (token + 1) * CHANNELS, is_there, 0.0).to(tl.float32)
    tl.store(out_ptr + at, y * _silu(z), inside)


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """As its definition in layers/gated_delta_net.py."""
    (windows, matrices), kept, heads, device = states.tensors, states.kept_drafts, layer.heads, qkvz.device
    num_tokens, of_seqs = len(qkvz), (starts, state_rows, count)
    sequences = Sequences(of_seqs, num_seqs)
    q, k, v, *gates = rule_inputs(qkvz, ba, layer, states, sequences, qkvz.dtype, CHUNK.value, True)
    w = torch.empty((num_tokens, heads.num_values * heads.key_dim), dtype=qkvz.dtype, device=device)
    precision = "ieee" if qkvz.dtype == torch.float32 else "tf32"
    launch(_chunks_kernel, (num_tokens // CHUNK.value + num_seqs, heads.num_values), device)(
        *(k, v, w, tuple(gates), of_seqs, num_seqs), HEADS=heads, SEQS_PAD=sequences.pad, PRECISION=precision
    )
    tile = min(VALUE_TILE, next_power_of_2(heads.value_dim))
    launch(_states_kernel, (triton.cdiv(heads.value_dim, tile), heads.num_values, num_seqs), device)(
        *(qkvz, (q, k, v, w, gates[0]), of_seqs, (windows, matrices, kept and kept.num_tokens), state_rows.stride(0)),
        HEADS=heads,
        TILE=tile,
        STAGES=2 if has_tma(device) else 1,  # by shared memory
        PRECISION=precision,
    )
    launch(_gated_norm_kernel, (num_tokens,), device)(
        *(v, qkvz, layer.norm.weight, out, of_seqs, num_seqs, layer.eps, sum(heads.sizes)), HEADS=heads
    )

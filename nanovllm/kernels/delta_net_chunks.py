"""Chunks of prompts by the gated delta rule (arXiv:2412.06464): matrix products of CHUNK tokens, with tensor cores.

Four kernels: convolution and gates; what can be computed of all chunks at the same time; the states, from chunk to
chunk; gated norm. In between, numbers have the dtype of the model, decays and states float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.delta_net import _silu
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, has_tma, launch, next_power_of_2

CHUNK = tl.constexpr(64)
VALUE_TILE = 32  # rows of a state that a program takes


@triton.jit
def _chunk_of(starts_ptr, num_seqs, index, SEQS_PAD: tl.constexpr):
    """Of all chunks in order, the index-th: its sequence, its first token, and those of the sequence and its end."""
    b = tl.arange(0, SEQS_PAD)
    begins = tl.load(starts_ptr + b, b < num_seqs, 0)
    ends = tl.load(starts_ptr + b + 1, b < num_seqs, 0)
    counts = tl.cdiv(ends - begins, CHUNK)
    totals = tl.cumsum(counts, 0)
    seq = tl.sum((totals <= index).to(tl.int32), 0)
    is_it = b == seq
    begin = tl.sum(tl.where(is_it, begins, 0), 0)
    first = begin + (index - tl.sum(tl.where(is_it, totals - counts, 0), 0)) * CHUNK
    return seq, first, begin, tl.sum(tl.where(is_it, ends, 0), 0)


@triton.jit
def _of_chunks(seq_ptrs):
    """Where the starts and the rows of states begin that belong to chunks: behind those of sequences that decode."""
    starts_ptr, rows_ptr, count_ptr = seq_ptrs
    if count_ptr is not None:
        num_decodes = tl.load(count_ptr)
        starts_ptr += num_decodes
        rows_ptr += num_decodes
    return starts_ptr, rows_ptr


@triton.jit
def _convolve(ptrs, t, begin, end, channel, inside, STRIDE, CHANNELS, SIZE: tl.constexpr):
    """SiLU of the convolution [tokens, channels] of tokens t, in float32; before `begin` is the window."""
    x_ptr, window_ptr, weight_ptr = ptrs
    y = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for i in tl.static_range(SIZE):
        s = t - (SIZE - 1) + i
        here = ((s >= begin) & (t < end))[:, None] & inside[None, :]
        x = tl.load(x_ptr + s[:, None].to(tl.int64) * STRIDE + channel[None, :], here, 0.0)
        if i < SIZE - 1:
            before = ((s < begin) & (t < end))[:, None] & inside[None, :]
            x += tl.load(window_ptr + (SIZE - 1 + s - begin)[:, None] * CHANNELS + channel[None, :], before, 0.0)
        weight = tl.load(weight_ptr + channel * SIZE + i, inside, 0.0).to(tl.float32)
        y += x.to(tl.float32) * weight[None, :]
    return _silu(y)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs"])
def _inputs_kernel(
    x_ptr,
    ba_ptr,
    seq_ptrs,
    window_ptr,
    weight_ptrs,
    out_ptrs,
    num_seqs,
    L2_EPS,
    HEADS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a chunk, and a head: queries first, then keys, then values with their gates."""
    gdc_launch_and_wait(PDL)
    starts_ptr, rows_ptr = _of_chunks(seq_ptrs)
    conv_ptr, a_log_ptr, dt_bias_ptr = weight_ptrs
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr = out_ptrs
    NUM_KEYS: tl.constexpr = HEADS.num_keys
    NUM_VALUES: tl.constexpr = HEADS.num_values
    KEYS: tl.constexpr = NUM_KEYS * HEADS.key_dim
    VALUES: tl.constexpr = NUM_VALUES * HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    seq, first, begin, end = _chunk_of(starts_ptr, num_seqs, tl.program_id(0), SEQS_PAD)
    if seq >= num_seqs:
        return
    head = tl.program_id(1)
    t = first + tl.arange(0, CHUNK)
    window = window_ptr + tl.load(rows_ptr + seq).to(tl.int64) * ((HEADS.conv_size - 1) * CHANNELS)
    stride = CHANNELS + VALUES
    convolution = x_ptr, window, conv_ptr
    if head < 2 * NUM_KEYS:
        d = tl.arange(0, next_power_of_2(HEADS.key_dim))
        in_key = d < HEADS.key_dim
        channel = head * HEADS.key_dim + d
        qk = _convolve(convolution, t, begin, end, channel, in_key, stride, CHANNELS, HEADS.conv_size)
        scale = tl.where(head < NUM_KEYS, HEADS.key_dim, 1)
        qk *= tl.rsqrt((tl.sum(qk * qk, 1) + L2_EPS) * scale)[:, None]
        target = q_ptr if head < NUM_KEYS else k_ptr
        own = head % NUM_KEYS * HEADS.key_dim + d
        tl.store(target + t[:, None].to(tl.int64) * KEYS + own[None, :], qk, (t < end)[:, None] & in_key[None, :])
    else:
        head -= 2 * NUM_KEYS
        e = tl.arange(0, next_power_of_2(HEADS.value_dim))
        in_value, own_value = e < HEADS.value_dim, head * HEADS.value_dim + e
        v = _convolve(convolution, t, begin, end, 2 * KEYS + own_value, in_value, stride, CHANNELS, HEADS.conv_size)
        value_at = t[:, None].to(tl.int64) * VALUES + own_value[None, :]
        tl.store(v_ptr + value_at, v, (t < end)[:, None] & in_value[None, :])
        b = tl.load(ba_ptr + t * (2 * NUM_VALUES) + head, t < end, 0.0).to(tl.float32)
        a = tl.load(ba_ptr + t * (2 * NUM_VALUES) + NUM_VALUES + head, t < end, 0.0).to(tl.float32)
        a += tl.load(dt_bias_ptr + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        log_decay = tl.where(t < end, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0)
        tl.store(decay_ptr + t * NUM_VALUES + head, tl.cumsum(log_decay, 0), t < end)
        tl.store(beta_ptr + t * NUM_VALUES + head, 1.0 / (1.0 + tl.exp(-b)), t < end)


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
    starts_ptr, _ = _of_chunks(seq_ptrs)
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEYS: tl.constexpr = HEADS.num_keys * HEADS.key_dim
    seq, first, _, end = _chunk_of(starts_ptr, num_seqs, tl.program_id(0), SEQS_PAD)
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


@triton.jit
def _shift_window(x_ptr, window_ptr, rows, channel, inside, CHANNELS: tl.constexpr, HEADS: tl.constexpr):
    """The window after the tokens of a sequence; what it keeps of the one before has moved to the front."""
    read, written, begin, end = rows
    SIZE: tl.constexpr = HEADS.conv_size
    stride = CHANNELS + HEADS.num_values * HEADS.value_dim
    for i in tl.static_range(SIZE - 1):
        t = end - (SIZE - 1) + i + 0 * channel
        x = tl.load(x_ptr + t.to(tl.int64) * stride + channel, inside & (t >= begin), 0.0)
        slot = read * (SIZE - 1) + i + (end - begin)
        x += tl.load(window_ptr + slot * CHANNELS + channel, inside & (t < begin), 0.0)
        tl.store(window_ptr + (written * (SIZE - 1) + i) * CHANNELS + channel, x, inside)


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
    starts_ptr, rows_ptr = _of_chunks(seq_ptrs)
    window_ptr, matrix_ptr = state_ptrs
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
    # windows: of the own values, and those of the key head by the first program of its group
    rows = read, written, begin, end
    _shift_window(x_ptr, window_ptr, rows, 2 * KEYS + head * VALUE_DIM + e, in_value, CHANNELS, HEADS)
    is_first = in_key & (head % GROUP + tile + 0 * d == 0)  # a vector: the interpreter takes no scalar in a mask
    channel = head // GROUP * KEY_DIM + d
    _shift_window(x_ptr, window_ptr, rows, channel, is_first, CHANNELS, HEADS)
    _shift_window(x_ptr, window_ptr, rows, KEYS + channel, is_first, CHANNELS, HEADS)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs"])
def _gated_norm_kernel(
    y_ptr, x_ptr, norm_ptr, out_ptr, seq_ptrs, num_seqs, eps, CHANNELS, HEADS: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_and_wait(PDL)
    starts_ptr, _ = _of_chunks(seq_ptrs)
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
    (windows, matrices), heads, device = states.tensors, layer.heads, qkvz.device
    num_tokens, of_seqs = len(qkvz), (starts, state_rows, count)
    make = lambda *shape, dtype=qkvz.dtype: torch.empty((num_tokens, *shape), dtype=dtype, device=device)
    q, k = make(heads.sizes[0]), make(heads.sizes[1])
    v, w = make(heads.sizes[2]), make(heads.num_values * heads.key_dim)
    decay, beta = make(heads.num_values, dtype=torch.float32), make(heads.num_values, dtype=torch.float32)
    max_chunks = num_tokens // CHUNK.value + num_seqs
    # two variants up to 1,024 sequences, as each is compiled
    seqs = dict(HEADS=heads, SEQS_PAD=32 if num_seqs <= 32 else max(1024, triton.next_power_of_2(num_seqs)))
    precision = "ieee" if qkvz.dtype == torch.float32 else "tf32"
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias
    launch(_inputs_kernel, (max_chunks, 2 * heads.num_keys + heads.num_values), device)(
        *(qkvz, ba, of_seqs, windows, weights, (q, k, v, decay, beta), num_seqs, layer.l2_eps), **seqs
    )
    launch(_chunks_kernel, (max_chunks, heads.num_values), device)(
        *(k, v, w, (decay, beta), of_seqs, num_seqs), PRECISION=precision, **seqs
    )
    tile = min(VALUE_TILE, next_power_of_2(heads.value_dim))
    launch(_states_kernel, (triton.cdiv(heads.value_dim, tile), heads.num_values, num_seqs), device)(
        *(qkvz, (q, k, v, w, decay), of_seqs, (windows, matrices), state_rows.stride(0)),
        HEADS=heads,
        TILE=tile,
        STAGES=2 if has_tma(device) else 1,  # by shared memory
        PRECISION=precision,
    )
    launch(_gated_norm_kernel, (num_tokens,), device)(
        *(v, qkvz, layer.norm.weight, out, of_seqs, num_seqs, layer.eps, sum(heads.sizes)), HEADS=heads
    )

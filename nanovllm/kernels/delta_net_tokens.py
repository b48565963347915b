"""The gated delta rule token by token: decode steps, drafts, and chunks too where no bit may depend on the batch.

Two kernels: convolution and gates of all tokens; then each state goes through the tokens of its sequence, in registers.
A decode step is bound by the states, 64 KiB for each head of the published models, which it reads and writes once.
A token is computed by the same instructions in a chunk, in a decode step and as a draft. With another number of warps
the bits were seen to differ.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.delta_net_inputs import Sequences, of_chunks, rows_of, rule_inputs, shift_window, silu
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch, next_power_of_2
from nanovllm.kernels.devices import num_sms
from nanovllm.kernels.invariant_attention import fma

NUM_WARPS = 8
TILE = tl.constexpr(8)  # tokens whose inputs, or whose norms, are computed together


@triton.jit
def _through_tokens(state, value_ptrs, head, begin, end, HEADS: tl.constexpr, STAGES: tl.constexpr):
    """The state after the tokens from begin to end; what each reads takes the place of v.

    A state is [VALUE_DIM, KEY_DIM / P, P], so that a thread has many keys of a few values: it adds up most of a sum.
    """
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr = value_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    KEY_DIM: tl.constexpr = HEADS.key_dim
    PARTS: tl.constexpr = state.shape[1]
    PART: tl.constexpr = state.shape[2]
    d = (tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :])[None, :, :]
    e = tl.arange(0, state.shape[0])
    key_at = head // (NUM_VALUES // HEADS.num_keys) * KEY_DIM + d
    for t in tl.range(begin, end, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        q = tl.load(q_ptr + token * (HEADS.num_keys * KEY_DIM) + key_at, d < KEY_DIM, 0.0)
        k = tl.load(k_ptr + token * (HEADS.num_keys * KEY_DIM) + key_at, d < KEY_DIM, 0.0)
        value_at = (token * NUM_VALUES + head) * HEADS.value_dim + e
        v = tl.load(v_ptr + value_at, e < HEADS.value_dim, 0.0)
        decay = tl.load(decay_ptr + token * NUM_VALUES + head)
        beta = tl.load(beta_ptr + token * NUM_VALUES + head)
        # both sums are of the state before, so that neither waits for the other
        error = fma(tl.sum(tl.sum(state * k, 1), 1), -decay, v) * beta
        read = fma(error, tl.sum(tl.sum(q * k, 1), 1), decay * tl.sum(tl.sum(state * q, 1), 1))
        state = fma(tl.broadcast_to(k, state.shape), error[:, None, None], state * decay)
        tl.store(v_ptr + value_at, read, e < HEADS.value_dim)
    return state


@triton.jit
def _keep_inputs(input_ptrs, ba_rows, written_ptrs, head, begin, own, certain, end, HEADS: tl.constexpr):
    """The window after the tokens before `certain`, and the inputs of those from there on.

    They are those of a value head, and for the first of a group also those of its key head.
    """
    x_rows, _, _ = input_ptrs
    x_ptr, x_stride = x_rows
    ba_ptr, ba_stride = ba_rows
    window_ptr, kept_ptr = written_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    KEYS: tl.constexpr = HEADS.num_keys * HEADS.key_dim
    VALUES: tl.constexpr = NUM_VALUES * HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEY_PAD: tl.constexpr = next_power_of_2(HEADS.key_dim)
    i = tl.arange(0, next_power_of_2(2 * KEY_PAD + next_power_of_2(HEADS.value_dim)))
    own_key, own_value = i % KEY_PAD, i - 2 * KEY_PAD
    key_channel = i // KEY_PAD * KEYS + head // GROUP * HEADS.key_dim + own_key
    channel = tl.where(own_value < 0, key_channel, 2 * KEYS + head * HEADS.value_dim + own_value)
    is_own_key = (own_key < HEADS.key_dim) & (head % GROUP + 0 * i == 0)  # the interpreter takes no scalar in a mask
    inside = ((own_value < 0) & is_own_key) | ((own_value >= 0) & (own_value < HEADS.value_dim))
    shift_window(input_ptrs, window_ptr, begin, own, certain, channel, inside, HEADS)
    if kept_ptr is not None:
        gate = tl.arange(0, 2)[None, :] * NUM_VALUES + head
        for first_draft in range(certain, end, TILE):
            t = (first_draft + tl.arange(0, TILE))[:, None]
            is_kept, row = (t < end) & inside[None, :], t.to(tl.int64)
            kept_row = kept_ptr + (t - certain) * (CHANNELS + 2 * NUM_VALUES)
            x = tl.load(x_ptr + row * x_stride + channel[None, :], is_kept, 0.0)
            gates = tl.load(ba_ptr + row * ba_stride + gate, t < end, 0.0)
            tl.store(kept_row + channel[None, :], x, is_kept)
            tl.store(kept_row + CHANNELS + gate, gates, t < end)


@triton.jit
def _gated_norms(
    x_rows, read_ptr, norm_ptr, out_ptr, eps, head, begin, end_read, end, stop, HEADS: tl.constexpr, TILE: tl.constexpr
):
    """Of a head, in rows from begin to end, and zeros from there to stop. What was read for the last one before
    `end_read` also stands for the rows after it.
    """
    x_ptr, x_stride = x_rows
    VALUES: tl.constexpr = HEADS.num_values * HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * HEADS.num_keys * HEADS.key_dim + VALUES
    e = tl.arange(0, next_power_of_2(HEADS.value_dim))[None, :]
    in_value, own_value = e < HEADS.value_dim, head * HEADS.value_dim + e
    weight = tl.load(norm_ptr + e, in_value, 0.0)
    for first_row in range(begin, stop, TILE):
        t = (first_row + tl.arange(0, TILE))[:, None]
        is_there, at = (t < end) & in_value, t.to(tl.int64) * VALUES + own_value
        y_at = (tl.minimum(t, end_read - 1) - begin).to(tl.int64) * VALUES + own_value
        y = tl.load(read_ptr + y_at, is_there, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 1) / HEADS.value_dim + eps)[:, None] * weight
        z = tl.load(x_ptr + t.to(tl.int64) * x_stride + CHANNELS + own_value, is_there, 0.0).to(tl.float32)
        tl.store(out_ptr + at, y * silu(z), (t < stop) & in_value)


# the states were written by the step before, and there is an ordinary launch, the embedding, between
@dependent_kernel(early=("seq_ptrs", "state_ptrs"))
@triton.jit(do_not_specialize=["rows_stride", "num_rows"])
def _tokens_kernel(
    x_rows,
    ba_rows,
    value_ptrs,
    seq_ptrs,
    state_ptrs,
    draft_ptrs,
    norm_ptr,
    out_ptr,
    rows_stride,
    written_stride,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a value head of a sequence: its tokens one after the other, then their gated norms.

    Of sequences with ROWS, drafts of the step before that were right come first. Then the state is stored after a token
    more, and what follows is computed without it.
    """
    gdc_launch_dependents(PDL)
    window_ptr, matrix_ptr = state_ptrs
    context_lens_ptr, kept_ptr, num_tokens_ptr, num_right_ptr = draft_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    KEYS: tl.constexpr = HEADS.num_keys * KEY_DIM
    VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    WINDOW: tl.constexpr = (HEADS.conv_size - 1) * CHANNELS
    head, seq = tl.program_id(0), tl.program_id(1)
    if ROWS == 0:
        starts_ptr, rows_ptr = of_chunks(seq_ptrs)
        own, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
        has_work = (own < end) | (seq == tl.num_programs(1) - 1)  # the last one has the rows of padding
    else:
        _, rows_ptr, count_ptr = seq_ptrs
        own, end = seq * ROWS, seq * ROWS + ROWS
        has_work = True
        if count_ptr is not None:
            has_work = own < tl.load(count_ptr)
    if not has_work:
        return
    read = tl.load(rows_ptr + seq * rows_stride).to(tl.int64)
    written = tl.load(rows_ptr + written_stride + seq * rows_stride).to(tl.int64)
    PART: tl.constexpr = min(32, next_power_of_2(KEY_DIM))
    PARTS: tl.constexpr = next_power_of_2(KEY_DIM) // PART
    d = (tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :])[None, :, :]
    e = tl.arange(0, next_power_of_2(VALUE_DIM))
    of_state = (e < VALUE_DIM)[:, None, None] & (d < KEY_DIM)
    state_at = (head * VALUE_DIM + e)[:, None, None] * KEY_DIM + d
    state = tl.load(matrix_ptr + read * (VALUES * KEY_DIM) + state_at, of_state, 0.0)
    gdc_wait(PDL)
    first, num_right, num_own = own, 0, end - own  # numbers of rows, drafts before them, and rows that are no copies
    certain = end
    if ROWS > 0:
        first, certain = seq * (KEPT + ROWS), own + 1
        if KEPT > 0:
            num_right = tl.load(num_right_ptr + seq)
            length = tl.load(context_lens_ptr + own)
            num_own = tl.load(context_lens_ptr + end - 1) - length + 1
    # 1. what the next step reads besides
    if KEPT > 0:
        kept_ptr += read * (KEPT * (CHANNELS + 2 * NUM_VALUES))
    inputs = x_rows, kept_ptr, window_ptr + read * WINDOW
    written_ptrs = window_ptr + written * WINDOW, kept_ptr
    _keep_inputs(inputs, ba_rows, written_ptrs, head, own - num_right, own, certain, end, HEADS)
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr + read) + end - own
        if KEPT > 0:
            num_tokens = length
        if head == 0:
            tl.store(num_tokens_ptr + written, num_tokens)
    # 2. up to the last token that is certain
    middle = first + num_right + certain - own
    state = _through_tokens(state, value_ptrs, head, first, middle, HEADS, STAGES)
    tl.store(matrix_ptr + written * (VALUES * KEY_DIM) + state_at, state, of_state)
    # 3. drafts, from there on
    if ROWS > 1:
        _through_tokens(state, value_ptrs, head, middle, first + num_right + num_own, HEADS, STAGES)
    # 4. norms; of a copy, those of what it is a copy of
    tl.debug_barrier()  # all threads have written what was read
    stop = end
    if ROWS == 0:
        stop = tl.where(seq == tl.num_programs(1) - 1, num_rows, end)
    first_read = value_ptrs[2] + (first + num_right).to(tl.int64) * VALUES
    _gated_norms(x_rows, first_read, norm_ptr, out_ptr, eps, head, own, own + num_own, end, stop, HEADS, TILE)


def _launch_tokens(
    qkvz, ba, layer: Any, states: Any, seqs: Sequences, written_stride: int, out, num_warps: int | None
) -> None:
    """Without `num_warps`, as many as are fastest: of many programs fewer warps, as these repeat less."""
    heads, device, kept, tile, input_warps = layer.heads, qkvz.device, states.kept_drafts, TILE.value, 4
    if num_warps is None:
        is_few = heads.num_values * seqs.number <= num_sms(device)
        num_warps = NUM_WARPS if is_few else NUM_WARPS // 2
        input_warps = 4 if is_few or seqs.rows > 1 else 1
        tile = 1 if seqs.rows + seqs.num_kept == 1 else tile
    inputs = rule_inputs(qkvz, ba, layer, states, seqs, torch.float32, tile, False, input_warps)
    drafts = seqs.drafts if seqs.rows else (None, None, kept and kept.num_tokens, None)
    launch(_tokens_kernel, (heads.num_values, seqs.number), device, shared=50)(
        *(rows_of(qkvz), rows_of(ba), tuple(inputs), seqs.ptrs, tuple(states.tensors), drafts, layer.norm.weight, out),
        *(seqs.ptrs[1].stride(-1), written_stride, len(qkvz), layer.eps),
        HEADS=heads,
        ROWS=seqs.rows,
        KEPT=seqs.num_kept,
        TILE=tile,
        STAGES=3,
        num_warps=num_warps,
    )


def delta_net_step(qkvz, ba, layer: Any, states: Any, rows, out, count=None, num_warps: int | None = None) -> None:
    """As its definition in layers/gated_delta_net.py."""
    _launch_tokens(qkvz, ba, layer, states, Sequences((None, rows, count), len(rows), 1), 0, out, num_warps)


def delta_net_drafts(
    qkvz, ba, layer: Any, states: Any, rows, context_lens, out, count=None, num_warps: int | None = None
) -> None:
    """As its definition in layers/delta_net_drafts.py."""
    kept, num_right = states.kept_drafts, torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    drafts = context_lens, kept.inputs, kept.num_tokens, num_right
    seqs = Sequences((None, rows, count), len(rows), len(qkvz) // len(rows), drafts)
    _launch_tokens(qkvz, ba, layer, states, seqs, 0, out, num_warps)


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """As its definition in layers/gated_delta_net.py, by the arithmetic of decode steps with NUM_WARPS."""
    seqs = Sequences((starts, state_rows, count), num_seqs)
    _launch_tokens(qkvz, ba, layer, states, seqs, state_rows.stride(0), out, NUM_WARPS)

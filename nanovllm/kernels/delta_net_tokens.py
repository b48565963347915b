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

from nanovllm.kernels.delta_net_inputs import (
    Plan,
    Sequences,
    bounds_of,
    heads_of,
    own_channels,
    rows_of,
    rows_of_state,
    rule_inputs,
    shift_window,
    silu,
)
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.devices import num_sms
from nanovllm.kernels.invariant_attention import fma

NUM_WARPS = 8
TILE = 8  # tokens whose inputs, or whose norms, are computed together


@triton.jit
def _through_tokens(state, rule_ptrs, head, key_at, begin, end, HEADS: tl.constexpr):
    """The state after the tokens from begin to end; what each reads takes the place of v."""
    e, in_key = tl.arange(0, state.shape[0]), key_at < HEADS.key_dim
    key_at += head // HEADS.group * HEADS.key_dim
    for t in tl.range(begin, end, num_stages=3):
        token = tl.cast(t, tl.int64)
        q = tl.load(rule_ptrs.q + token * HEADS.keys + key_at, in_key, 0.0)
        k = tl.load(rule_ptrs.k + token * HEADS.keys + key_at, in_key, 0.0)
        value_at = (token * HEADS.num_values + head) * HEADS.value_dim + e
        v = tl.load(rule_ptrs.v + value_at, e < HEADS.value_dim, 0.0)
        decay = tl.load(rule_ptrs.decay + token * HEADS.num_values + head)
        beta = tl.load(rule_ptrs.beta + token * HEADS.num_values + head)
        # both sums are of the state before, so that neither waits for the other
        error = fma(tl.sum(tl.sum(state * k, 1), 1), -decay, v) * beta
        read = fma(error, tl.sum(tl.sum(q * k, 1), 1), decay * tl.sum(tl.sum(state * q, 1), 1))
        state = fma(tl.broadcast_to(k, state.shape), error[:, None, None], state * decay)
        tl.store(rule_ptrs.v + value_at, read, e < HEADS.value_dim)
    return state


@triton.jit
def _keep_drafts(x_rows, kept_ptr, head, channel, inside, begin, end, TILE: tl.constexpr, HEADS: tl.constexpr):
    """The inputs of tokens from begin to end, of these channels and a value head's gates."""
    x_ptr, x_stride, ba_ptr, ba_stride = x_rows
    channel, gate = channel[None, :], tl.arange(0, 2)[None, :] * HEADS.num_values + head
    for first in range(begin, end, TILE):
        t = (first + tl.arange(0, TILE))[:, None]
        is_kept, row = (t < end) & inside[None, :], t.to(tl.int64)
        kept_row = kept_ptr + (t - begin) * HEADS.draft
        x = tl.load(x_ptr + row * x_stride + channel, is_kept, 0.0)
        gates = tl.load(ba_ptr + row * ba_stride + gate, t < end, 0.0)
        tl.store(kept_row + channel, x, is_kept)
        tl.store(kept_row + HEADS.channels + gate, gates, t < end)


@triton.jit
def _gated_norms(x_rows, read_ptr, norm, out_ptr, head, bounds, TILE: tl.constexpr, HEADS: tl.constexpr):
    """Of a head, in rows from begin to end, and zeros from there to stop. What was read for the last one before
    `end_read` also stands for the rows after it.
    """
    x_ptr, x_stride, _, _ = x_rows
    norm_ptr, eps = norm
    begin, end_read, end, stop = bounds
    e = tl.arange(0, HEADS.value_pad)[None, :]
    in_value, own_value = e < HEADS.value_dim, head * HEADS.value_dim + e
    weight = tl.load(norm_ptr + e, in_value, 0.0)
    for first in range(begin, stop, TILE):
        t = (first + tl.arange(0, TILE))[:, None]
        is_there, row = (t < end) & in_value, t.to(tl.int64)
        y_at = (tl.minimum(t, end_read - 1) - begin).to(tl.int64) * HEADS.values + own_value
        y = tl.load(read_ptr + y_at, is_there, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 1) / HEADS.value_dim + eps)[:, None] * weight
        z = tl.load(x_ptr + row * x_stride + HEADS.channels + own_value, is_there, 0.0).to(tl.float32)
        tl.store(out_ptr + row * HEADS.values + own_value, y * silu(z), (t < stop) & in_value)


# the states were written by the step before, and there is an ordinary launch, the embedding, between
@dependent_kernel(early=("seq_ptrs", "state_ptrs"))
@triton.jit(do_not_specialize=["num_rows", "stride"])
def _tokens_kernel(
    x_rows, rule_ptrs, seq_ptrs, state_ptrs, norm_ptrs, out_ptr, num_rows, stride, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """A program takes a value head of a sequence: its tokens one after the other, then their gated norms.

    Of sequences with ROWS, drafts of the step before that were right come first. Then the state is stored after a token
    more, and what follows is computed without it.
    """
    gdc_launch_dependents(PDL)
    HEADS: tl.constexpr = PLAN.heads
    ROWS: tl.constexpr = PLAN.rows
    KEPT: tl.constexpr = PLAN.kept
    window_ptr, matrix_ptr, kept_ptr, num_tokens_ptr = state_ptrs
    head, seq = tl.program_id(0), tl.program_id(1)
    own, end = bounds_of(seq_ptrs, seq, ROWS)
    is_last, has_work = seq == tl.num_programs(1) - 1, True
    if ROWS == 0:
        has_work = (own < end) | is_last  # which has the rows of padding
    elif seq_ptrs.count is not None:
        has_work = own < tl.load(seq_ptrs.count)
    if not has_work:
        return
    read, written = rows_of_state(seq_ptrs, seq, stride, ROWS)
    # [value_dim, key_dim / P, P], so that a thread has many keys of a few values: it adds up most of a sum
    PART: tl.constexpr = min(32, HEADS.key_pad)
    d = (tl.arange(0, HEADS.key_pad // PART)[:, None] * PART + tl.arange(0, PART)[None, :])[None, :, :]
    e = tl.arange(0, HEADS.value_pad)[:, None, None]
    of_state = (e < HEADS.value_dim) & (d < HEADS.key_dim)
    state_at = (head * HEADS.value_dim + e) * HEADS.key_dim + d
    state = tl.load(matrix_ptr + read * (HEADS.values * HEADS.key_dim) + state_at, of_state, 0.0)
    gdc_wait(PDL)
    first, num_right, num_own, certain = own, 0, end - own, end  # num_own: rows that are no copies
    if ROWS > 0:
        first, certain = seq * (KEPT + ROWS), own + 1
    if KEPT > 0:
        num_right = tl.load(seq_ptrs.num_right + seq)
        length = tl.load(seq_ptrs.context_lens + own)
        num_own = tl.load(seq_ptrs.context_lens + end - 1) - length + 1
        kept_ptr += read * (KEPT * HEADS.draft)
    # 1. what the next step reads besides
    channel, inside = own_channels(head, HEADS)
    source = x_rows[0], x_rows[1], kept_ptr, window_ptr + read * HEADS.window, own - num_right, own
    shift_window(source, window_ptr + written * HEADS.window, certain, channel, inside, HEADS)
    if KEPT > 0:
        _keep_drafts(x_rows, kept_ptr, head, channel, inside, certain, end, PLAN.tile, HEADS)
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr + read) + end - own
        if KEPT > 0:
            num_tokens = length
        if head == 0:
            tl.store(num_tokens_ptr + written, num_tokens)
    # 2. up to the last token that is certain
    middle = first + num_right + certain - own
    state = _through_tokens(state, rule_ptrs, head, d, first, middle, HEADS)
    tl.store(matrix_ptr + written * (HEADS.values * HEADS.key_dim) + state_at, state, of_state)
    # 3. drafts, from there on
    if ROWS > 1:
        _through_tokens(state, rule_ptrs, head, d, middle, first + num_right + num_own, HEADS)
    # 4. norms; of a copy, those of what it is a copy of
    tl.debug_barrier()  # all threads have written what was read
    stop = end
    if ROWS == 0:
        stop = tl.where(is_last, num_rows, end)
    first_read = rule_ptrs.v + (first + num_right).to(tl.int64) * HEADS.values
    _gated_norms(x_rows, first_read, norm_ptrs, out_ptr, head, (own, own + num_own, end, stop), PLAN.tile, HEADS)


def _launch_tokens(
    qkvz, ba, layer: Any, states: Any, seqs: Sequences, sizes: tuple, out, num_warps: int | None
) -> None:
    """`sizes`: sequences, rows of each, and the most drafts. Without `num_warps`, as many as are fastest: of many
    programs fewer warps, as these repeat less.
    """
    (num_seqs, rows, kept), device, input_warps, tile, kept_drafts = sizes, qkvz.device, 4, TILE, states.kept_drafts
    if num_warps is None:
        is_few = layer.heads.num_values * num_seqs <= num_sms(device)
        num_warps = NUM_WARPS if is_few else NUM_WARPS // 2
        input_warps = 4 if is_few or rows > 1 else 1
        tile = 1 if rows + kept == 1 else tile
    plan = Plan(heads_of(layer.heads), tile, rows, kept)
    x_rows, state_ptrs = (
        (*rows_of(qkvz), *rows_of(ba)),
        (*states.tensors, kept_drafts.inputs if kept else None, kept_drafts and kept_drafts.num_tokens),
    )
    inputs = rule_inputs(x_rows, layer, state_ptrs, seqs, num_seqs, plan, torch.float32, input_warps)
    launch(_tokens_kernel, (layer.heads.num_values, num_seqs), device, shared=50)(
        *(x_rows, inputs, seqs, state_ptrs, (layer.norm.weight, layer.eps), out, len(qkvz), seqs.rows.stride(0)),
        PLAN=plan,
        num_warps=num_warps,
    )


def delta_net_step(qkvz, ba, layer: Any, states: Any, rows, out, count=None, num_warps: int | None = None) -> None:
    """As its definition in layers/gated_delta_net.py."""
    _launch_tokens(qkvz, ba, layer, states, Sequences(rows, count), (len(rows), 1, 0), out, num_warps)


def delta_net_drafts(
    qkvz, ba, layer: Any, states: Any, rows, context_lens, out, count=None, num_warps: int | None = None
) -> None:
    """As its definition in layers/delta_net_drafts.py."""
    num_right = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    seqs = Sequences(rows, count, None, context_lens, num_right)
    sizes = len(rows), len(qkvz) // len(rows), states.kept_drafts.inputs.shape[1]
    _launch_tokens(qkvz, ba, layer, states, seqs, sizes, out, num_warps)


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """As its definition in layers/gated_delta_net.py, by the arithmetic of decode steps with NUM_WARPS."""
    seqs = Sequences(state_rows, count, starts)
    _launch_tokens(qkvz, ba, layer, states, seqs, (num_seqs, 0, 0), out, NUM_WARPS)

"""Computes the convolution and the gates of the gated delta rule, and stores inputs for the next step."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.delta_net.kernels.delta_net_operands import Plan, Sequences, chunk_of, pad_of, sequence_of
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2


class RuleInputs(NamedTuple):
    """The inputs of the delta rule for each token.

    For chunks, the tuple also contains intermediate results of the kernels.
    """

    q: torch.Tensor  # [T, key heads * key_dim]
    k: torch.Tensor  # [T, key heads * key_dim]
    v: torch.Tensor  # [T, value heads * value_dim]
    decay: torch.Tensor  # [T, value heads] float32; with `is_summed`, the sum of log decays since the tile began
    beta: torch.Tensor  # [T, value heads] float32
    num_right: torch.Tensor | None  # the number of accepted drafts of the previous step, for each sequence
    w: torch.Tensor | None = None  # [T, value heads * key_dim]
    states: torch.Tensor | None = None  # the state before each chunk, for each value head


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load_inputs(source, first, t, channel, inside, PLAN: tl.constexpr):
    """Load the inputs of the convolution for the tokens `t`. The lowest index in `t` is `first`."""
    HEADS: tl.constexpr = PLAN.heads
    x_rows, state_ptrs, row, begin, own = source
    x = tl.load(x_rows.qkvz + t.to(tl.int64) * x_rows.stride + channel, inside & (t >= own), 0.0)
    if first < own:
        window_ptr = state_ptrs.windows + row * ((HEADS.conv_size - 1) * HEADS.channels)
        slot = HEADS.conv_size - 1 + t - begin
        x += tl.load(window_ptr + slot * HEADS.channels + channel, inside & (t < begin), 0.0)
        if PLAN.kept:
            kept_ptr = state_ptrs.kept + row * (PLAN.kept * HEADS.draft)
            is_kept = inside & (t >= begin) & (t < own)
            x += tl.load(kept_ptr + (t - begin) * HEADS.draft + channel, is_kept, 0.0)
    return x


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs", "stride"])
def _inputs_kernel(
    x_rows, weight_ptrs, seq_ptrs, state_ptrs, out_ptrs, num_seqs, stride, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """Each program computes one head for a tile of a sequence's tokens.

    The programs of query heads come first, then those of key heads, then those of value heads. Programs of value heads
    also compute gates.
    """
    gdc_launch_and_wait(PDL)
    HEADS: tl.constexpr = PLAN.heads
    SIZE: tl.constexpr = HEADS.conv_size
    conv_ptr, a_log_ptr, dt_bias_ptr, l2_eps = weight_ptrs
    head, tile, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PLAN.rows == 0:
        seq, tile = chunk_of(seq_ptrs, num_seqs, tile, PLAN.tile, PLAN.seqs_pad)
    elif seq_ptrs.count is not None:
        num_seqs = tl.load(seq_ptrs.count) // PLAN.rows
    if seq >= num_seqs:
        return
    own, end, row, _ = sequence_of(seq_ptrs, seq, stride, PLAN)
    begin, shift = own, 0
    if PLAN.kept:
        num_right = tl.load(seq_ptrs.context_lens + own) - 1 - tl.load(state_ptrs.num_tokens + row)
        num_right = tl.minimum(tl.maximum(num_right, 0), PLAN.kept)  # for padding, it may be any number
        begin -= num_right
        if tile + head == 0:
            tl.store(out_ptrs.num_right + seq, num_right)
    if PLAN.rows:
        shift = seq * (PLAN.kept + PLAN.rows) - begin
    source = x_rows, state_ptrs, row, begin, own
    kind = tl.minimum(head // HEADS.num_keys, 2)  # 0 is a query, 1 a key, 2 a value
    own_head, dim = head - kind * HEADS.num_keys, tl.where(kind < 2, HEADS.key_dim, HEADS.value_dim)
    out_ptr = out_ptrs.q if kind == 0 else (out_ptrs.k if kind == 1 else out_ptrs.v)
    d, i = tl.arange(0, HEADS.pad), tl.arange(0, next_power_of_2(SIZE))[None, :]
    inside, column, width = d < dim, own_head * dim + d, tl.where(kind < 2, HEADS.keys, HEADS.values)
    channel = kind * HEADS.keys + column
    weight = tl.load(conv_ptr + channel[:, None] * SIZE + i, (i < SIZE) & inside[:, None], 0.0).to(tl.float32)
    # a part of the tokens at a time, so that inputs fit into registers
    PART: tl.constexpr = PLAN.tile if PLAN.tile < 16 else 16
    first = begin + tile * PLAN.tile
    stop = tl.minimum(first + PLAN.tile, end)
    for part in range(first, stop, PART):
        t = (part + tl.arange(0, PART))[:, None]
        is_there = (t < end) & inside[None, :]
        y = tl.zeros([PART, d.shape[0]], tl.float32)
        for tap in tl.static_range(SIZE):
            before = t - (SIZE - 1) + tap
            x = _load_inputs(source, part - (SIZE - 1), before, channel[None, :], is_there, PLAN)
            y += x.to(tl.float32) * tl.sum(tl.where(i == tap, weight, 0.0), 1)[None, :]
        y = silu(y)
        if kind < 2:
            y *= tl.rsqrt((tl.sum(y * y, 1) + l2_eps) * tl.where(kind == 0, HEADS.key_dim, 1))[:, None]
        own_out = out_ptr + tl.cast(shift + part, tl.int64) * width
        tl.store(own_out + (tl.arange(0, PART)[:, None] * width + column[None, :]), y, is_there)
    if kind < 2:
        return
    t = first + tl.arange(0, PLAN.tile)
    b_ptr, is_own = x_rows.ba + t.to(tl.int64) * x_rows.ba_stride + own_head, (t >= own) & (t < end)
    b, a = tl.load(b_ptr, is_own, 0.0), tl.load(b_ptr + HEADS.num_values, is_own, 0.0)
    if PLAN.kept:
        kept_ptr = state_ptrs.kept + row * (PLAN.kept * HEADS.draft) + HEADS.channels + own_head
        b_ptr = kept_ptr + (t - begin) * HEADS.draft
        b += tl.load(b_ptr, t < own, 0.0)
        a += tl.load(b_ptr + HEADS.num_values, t < own, 0.0)
    a = a.to(tl.float32) + tl.load(dt_bias_ptr + own_head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.where(t < end, -tl.exp(tl.load(a_log_ptr + own_head)) * softplus, 0.0)
    decay = tl.cumsum(decay, 0) if PLAN.is_summed else tl.exp(decay)
    gate_at = (shift + t).to(tl.int64) * HEADS.num_values + own_head
    tl.store(out_ptrs.decay + gate_at, decay, t < end)
    tl.store(out_ptrs.beta + gate_at, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), t < end)


@triton.jit
def keep_inputs(source, written, head, certain, end, PLAN: tl.constexpr):
    """Store what the next step needs: the convolution's window, and the inputs of drafts.

    The drafts begin at token `certain`, and the window contains the inputs before this token. A call stores the
    channels of one value head. The call for the first value head of a group also stores the channels of the query and
    key heads.
    """
    HEADS: tl.constexpr = PLAN.heads
    SIZE: tl.constexpr = HEADS.conv_size
    x_rows, state_ptrs, read, begin, _ = source
    column = tl.arange(0, 4 * HEADS.pad)[None, :]
    kind, d = column // HEADS.pad, column % HEADS.pad  # 0 is a query, 1 a key, 2 a value
    key_channel = kind * HEADS.keys + head // HEADS.group * HEADS.key_dim + d
    channel = tl.where(kind < 2, key_channel, 2 * HEADS.keys + head * HEADS.value_dim + d)
    is_key = (d < HEADS.key_dim) & (head % HEADS.group + 0 * d == 0)  # Triton's interpreter needs a tensor here
    inside = ((kind < 2) & is_key) | ((kind == 2) & (d < HEADS.value_dim))
    i, first = tl.arange(0, next_power_of_2(SIZE - 1))[:, None], certain - (SIZE - 1)
    in_window = (i < SIZE - 1) & inside
    window_ptr = state_ptrs.windows + written * ((SIZE - 1) * HEADS.channels)
    window = _load_inputs(source, first, first + i, channel, in_window, PLAN)
    tl.debug_barrier()  # until all threads have read the old window, whose last inputs move to the front
    tl.store(window_ptr + i * HEADS.channels + channel, window, in_window)
    if state_ptrs.num_tokens is not None and head == 0:
        tl.store(state_ptrs.num_tokens + written, tl.load(state_ptrs.num_tokens + read) + certain - begin)
    if PLAN.kept:
        kept_ptr = state_ptrs.kept + read * (PLAN.kept * HEADS.draft)
        gate = tl.arange(0, 2)[None, :] * HEADS.num_values + head
        for first_draft in range(certain, end, PLAN.tile):
            t = (first_draft + tl.arange(0, PLAN.tile))[:, None]
            row, kept_row = t.to(tl.int64), kept_ptr + (t - certain) * HEADS.draft
            x = tl.load(x_rows.qkvz + row * x_rows.stride + channel, (t < end) & inside, 0.0)
            gates = tl.load(x_rows.ba + row * x_rows.ba_stride + gate, t < end, 0.0)
            tl.store(kept_row + channel, x, (t < end) & inside)
            tl.store(kept_row + HEADS.channels + gate, gates, t < end)


def rule_inputs(
    operands: tuple, layer: Any, seqs: Sequences, num_seqs: int, plan: Plan, dtype, num_warps: int = 4
) -> RuleInputs:
    """Compute the inputs of the delta rule, with q, k and v in `dtype`.

    For each decoding sequence, the result contains `plan.kept` rows for drafts of the previous step, followed by
    `plan.rows` rows for tokens of this step.
    """
    heads, x, states = operands
    if plan.rows:
        num_tokens = num_seqs * (plan.kept + plan.rows)
        tiles = triton.cdiv(plan.kept + plan.rows, plan.tile), num_seqs
    else:
        num_tokens, plan = len(x.qkvz), plan._replace(seqs_pad=pad_of(num_seqs))
        tiles = num_tokens // plan.tile + num_seqs, 1
    make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.qkvz.device)
    qkv = (make(num_tokens, size, dtype=dtype) for size in layer.heads.sizes)
    gates = make(num_tokens, heads.num_values), make(num_tokens, heads.num_values)
    inputs = RuleInputs(*qkv, *gates, make(num_seqs, dtype=torch.int32) if plan.kept else None)
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.l2_eps
    launch(_inputs_kernel, (2 * heads.num_keys + heads.num_values, *tiles), x.qkvz.device)(
        *(x, weights, seqs, states, inputs, num_seqs, seqs.rows.stride(0)), PLAN=plan, num_warps=num_warps
    )
    return inputs

"""Convolution and gates of the gated delta rule, of all tokens of a step at the same time.

Tokens of a sequence are numbered like the rows of x that they have in the step, from `own` on. Before them, from
`begin` on, may come drafts of the step before that were right, whose inputs were kept; before these comes the window.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2


class Heads(NamedTuple):
    """The DeltaHeads of a layer, and what follows from them."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    conv_size: int
    group: int  # value heads of a key head
    keys: int  # numbers that a token has in all its keys, as in its queries
    values: int
    channels: int  # of the convolution: queries, keys, values
    draft: int  # what is kept of a draft: channels and gates
    window: int  # what the convolution reads of the tokens before
    key_pad: int
    value_pad: int


@cache
def heads_of(layer_heads: Any) -> Heads:
    (num_keys, num_values, key_dim, value_dim, conv_size), sizes = layer_heads, layer_heads.sizes
    pads, channels = (triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)), sum(sizes)
    more = num_values // num_keys, *sizes[1:], channels, channels + 2 * num_values, (conv_size - 1) * channels
    return Heads(*layer_heads, *more, *pads)


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    heads: Heads
    tile: int  # tokens of a program, or heads, or values of a head
    rows: int = 0  # of each sequence; 0: they have chunks
    kept: int = 0  # drafts of the step before, at most
    pad: int = 0  # as many sequences as this, a power of two, may have chunks
    stages: int = 1  # of loads ahead
    is_summed: bool = False  # decays become the sums of their logarithms within each tile


class Sequences(NamedTuple):
    """What kernels read of the sequences of a step, of those that decode or those with chunks."""

    rows: torch.Tensor  # of states [number]; with chunks [2, number], those that are read, and those that are written
    count: torch.Tensor | None  # how many rows decode, if it may be less than there is room for
    starts: torch.Tensor | None = None  # of chunks
    context_lens: torch.Tensor | None = None  # of drafts
    num_right: torch.Tensor | None = None  # drafts of the step before: written here


class RuleInputs(NamedTuple):
    """Of each token and head, as in layers/gated_delta_net.py; a key head once for all of its value heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def num_decodes(seq_ptrs):
    """How many sequences come before those with chunks."""
    return 0 if seq_ptrs.count is None else tl.load(seq_ptrs.count)


@triton.jit
def bounds_of(seq_ptrs, seq, ROWS: tl.constexpr):
    """The first token of a sequence, and the one after its last."""
    begin, end = seq * ROWS, seq * ROWS + ROWS
    if ROWS == 0:
        starts_ptr = seq_ptrs.starts + num_decodes(seq_ptrs) + seq
        begin, end = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    return begin, end


@triton.jit
def rows_of_state(seq_ptrs, seq, stride, ROWS: tl.constexpr):
    """The row of the state that a sequence reads, and of the one that it writes."""
    if ROWS > 0:
        read = tl.load(seq_ptrs.rows + seq * stride)
        written = read
    else:
        rows_ptr = seq_ptrs.rows + num_decodes(seq_ptrs) + seq
        read, written = tl.load(rows_ptr), tl.load(rows_ptr + stride)
    return read.to(tl.int64), written.to(tl.int64)


@triton.jit
def chunk_of(seq_ptrs, num_seqs, index, CHUNK: tl.constexpr, PAD: tl.constexpr):
    """Of all chunks in order, the index-th: its sequence, or a number from `num_seqs` on, and its number in that."""
    seq = tl.arange(0, PAD)
    starts_ptr = seq_ptrs.starts + num_decodes(seq_ptrs) + seq
    lengths = tl.load(starts_ptr + 1, seq < num_seqs, 0) - tl.load(starts_ptr, seq < num_seqs, 0)
    totals = tl.cumsum(tl.cdiv(lengths, CHUNK), 0)
    is_before = totals <= index
    return tl.sum(is_before.to(tl.int32), 0), index - tl.max(tl.where(is_before, totals, 0), 0)


@triton.jit
def load_inputs(source, first, t, channel, inside, HEADS: tl.constexpr):
    """What the convolution reads of tokens t, from the `first` on."""
    x_ptr, x_stride, kept_ptr, window_ptr, begin, own = source
    x = tl.load(x_ptr + t.to(tl.int64) * x_stride + channel, inside & (t >= own), 0.0)
    if first < own:
        slot = HEADS.conv_size - 1 + t - begin
        x += tl.load(window_ptr + slot * HEADS.channels + channel, inside & (t < begin), 0.0)
        if kept_ptr is not None:
            is_kept = inside & (t >= begin) & (t < own)
            x += tl.load(kept_ptr + (t - begin) * HEADS.draft + channel, is_kept, 0.0)
    return x


@triton.jit
def shift_window(source, written_ptr, end, channel, inside, HEADS: tl.constexpr):
    """The window after the tokens before `end`; what it keeps of the one before moves to the front."""
    i, channel = tl.arange(0, next_power_of_2(HEADS.conv_size - 1))[:, None], channel[None, :]
    inside = (i < HEADS.conv_size - 1) & inside[None, :]
    first = end - (HEADS.conv_size - 1)
    x = load_inputs(source, first, first + i, channel, inside, HEADS)
    tl.debug_barrier()  # all threads have read the window
    tl.store(written_ptr + i * HEADS.channels + channel, x, inside)


@triton.jit
def own_channels(head, HEADS: tl.constexpr):
    """The channels of a value head and, for the first of a group, of its key head; and which of them there are."""
    i = tl.arange(0, next_power_of_2(2 * HEADS.key_pad + HEADS.value_pad))
    own_key, own_value = i % HEADS.key_pad, i - 2 * HEADS.key_pad
    key_channel = i // HEADS.key_pad * HEADS.keys + head // HEADS.group * HEADS.key_dim + own_key
    is_key = (own_key < HEADS.key_dim) & (head % HEADS.group + 0 * i == 0)  # the interpreter takes no scalar in a mask
    channel = tl.where(own_value < 0, key_channel, 2 * HEADS.keys + head * HEADS.value_dim + own_value)
    return channel, ((own_value < 0) & is_key) | ((own_value >= 0) & (own_value < HEADS.value_dim))


@triton.jit
def _convolve(
    source, conv_ptr, out_ptr, tokens, channel, norm, DIM: tl.constexpr, HEADS: tl.constexpr, PART: tl.constexpr
):
    """SiLU of the convolution of a head, whose first channel is given; the norm of queries and keys."""
    first, stop, end, shift, stride = tokens
    SIZE: tl.constexpr = HEADS.conv_size
    d, i = tl.arange(0, next_power_of_2(DIM)), tl.arange(0, next_power_of_2(SIZE))[None, :]
    inside, channel = d < DIM, channel + d
    weight = tl.load(conv_ptr + channel[:, None] * SIZE + i, (i < SIZE) & inside[:, None], 0.0).to(tl.float32)
    for part in range(first, stop, PART):
        t = (part + tl.arange(0, PART))[:, None]
        is_there = (t < end) & inside[None, :]
        y = tl.zeros([PART, d.shape[0]], tl.float32)
        for tap in tl.static_range(SIZE):
            before = t - (SIZE - 1) + tap
            x = load_inputs(source, part - (SIZE - 1), before, channel[None, :], is_there, HEADS)
            y += x.to(tl.float32) * tl.sum(tl.where(i == tap, weight, 0.0), 1)[None, :]
        y = silu(y)
        if norm is not None:
            eps, scale = norm
            y *= tl.rsqrt((tl.sum(y * y, 1) + eps) * scale)[:, None]
        tl.store(out_ptr + (shift + t).to(tl.int64) * stride + d[None, :], y, is_there)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs", "stride"])
def _inputs_kernel(in_ptrs, seq_ptrs, state_ptrs, out_ptrs, num_seqs, stride, PLAN: tl.constexpr, PDL: tl.constexpr):
    """A program takes a head, of queries first, then keys, then values with their gates, and a tile of a sequence's
    tokens.
    """
    gdc_launch_and_wait(PDL)
    HEADS: tl.constexpr = PLAN.heads
    ROWS: tl.constexpr = PLAN.rows
    KEPT: tl.constexpr = PLAN.kept
    x_ptr, x_stride, ba_ptr, ba_stride, conv_ptr, a_log_ptr, dt_bias_ptr, l2_eps = in_ptrs
    window_ptr, _, kept_ptr, num_tokens_ptr = state_ptrs
    head, tile, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ROWS == 0:
        seq, tile = chunk_of(seq_ptrs, num_seqs, tile, PLAN.tile, PLAN.pad)
    elif seq_ptrs.count is not None:
        num_seqs = tl.load(seq_ptrs.count) // ROWS
    if seq >= num_seqs:
        return
    own, end = bounds_of(seq_ptrs, seq, ROWS)
    row, _ = rows_of_state(seq_ptrs, seq, stride, ROWS)
    num_right, shift = 0, 0
    if KEPT > 0:
        num_right = tl.load(seq_ptrs.context_lens + own) - 1 - tl.load(num_tokens_ptr + row)
        num_right = tl.minimum(tl.maximum(num_right, 0), KEPT)  # of padding it may be anything
        kept_ptr += row * (KEPT * HEADS.draft)
        if tile + head == 0:
            tl.store(seq_ptrs.num_right + seq, num_right)
    begin = own - num_right
    if ROWS > 0:  # there is room for all drafts
        shift = seq * (KEPT + ROWS) - begin
    first = begin + tile * PLAN.tile
    stop = tl.minimum(first + PLAN.tile, end)
    source = x_ptr, x_stride, kept_ptr, window_ptr + row * HEADS.window, begin, own
    # parts of the tokens, whose inputs fit into registers
    PART: tl.constexpr = min(PLAN.tile, 16)
    if head < 2 * HEADS.num_keys:
        out_ptr = (out_ptrs.q if head < HEADS.num_keys else out_ptrs.k) + head % HEADS.num_keys * HEADS.key_dim
        norm = l2_eps, tl.where(head < HEADS.num_keys, HEADS.key_dim, 1)
        tokens = first, stop, end, shift, HEADS.keys
        _convolve(source, conv_ptr, out_ptr, tokens, head * HEADS.key_dim, norm, HEADS.key_dim, HEADS, PART)
    else:
        head -= 2 * HEADS.num_keys
        own_value = head * HEADS.value_dim
        tokens = first, stop, end, shift, HEADS.values
        _convolve(
            source,
            conv_ptr,
            out_ptrs.v + own_value,
            tokens,
            2 * HEADS.keys + own_value,
            None,
            HEADS.value_dim,
            HEADS,
            PART,
        )
        t = first + tl.arange(0, PLAN.tile)
        gates_at = ba_ptr + t.to(tl.int64) * ba_stride + head
        is_own = (t >= own) & (t < end)
        b, a = tl.load(gates_at, is_own, 0.0), tl.load(gates_at + HEADS.num_values, is_own, 0.0)
        if KEPT > 0:
            kept_at = kept_ptr + (t - begin) * HEADS.draft + HEADS.channels + head
            b += tl.load(kept_at, t < own, 0.0)
            a += tl.load(kept_at + HEADS.num_values, t < own, 0.0)
        a = a.to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        decay = tl.where(t < end, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0)
        decay = tl.cumsum(decay, 0) if PLAN.is_summed else tl.exp(decay)
        gate_at = (shift + t).to(tl.int64) * HEADS.num_values + head
        tl.store(out_ptrs.decay + gate_at, decay, t < end)
        tl.store(out_ptrs.beta + gate_at, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), t < end)


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What kernels take for rows [T, N] that may lie apart: where the first one is, and how far it is to the next."""
    return x, x.stride(0)


def pad_of(num_seqs: int) -> int:
    """Two variants up to 1,024 sequences, as each is compiled."""
    return 32 if num_seqs <= 32 else max(1024, triton.next_power_of_2(num_seqs))


def rule_inputs(
    in_rows, layer, state_ptrs, seqs, num_seqs: int, plan: Plan, dtype: torch.dtype, num_warps=4
) -> RuleInputs:
    """q, k and v in `dtype`. A sequence that decodes has room for all drafts of the step before, and for its rows."""
    qkvz = in_rows[0]
    if plan.rows:
        num_tokens = num_seqs * (plan.kept + plan.rows)
        tiles = triton.cdiv(plan.kept + plan.rows, plan.tile), num_seqs
    else:
        num_tokens, plan = len(qkvz), plan._replace(pad=pad_of(num_seqs))
        tiles = num_tokens // plan.tile + num_seqs, 1
    make = lambda size, dtype: torch.empty((num_tokens, size), dtype=dtype, device=qkvz.device)
    gates = (make(plan.heads.num_values, torch.float32) for _ in range(2))
    inputs = RuleInputs(*(make(size, dtype) for size in layer.heads.sizes), *gates)
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.l2_eps
    launch(_inputs_kernel, (2 * plan.heads.num_keys + plan.heads.num_values, *tiles), qkvz.device)(
        (*in_rows, *weights), seqs, state_ptrs, inputs, num_seqs, seqs.rows.stride(0), PLAN=plan, num_warps=num_warps
    )
    return inputs

"""Convolution and gates of the gated delta rule, of all tokens of a step at the same time.

Tokens of a sequence are numbered like the rows of x that they have in the step, from `own` on. Before them, from
`begin` on, may come drafts of the step before that were right, whose inputs were kept; before these comes the window.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def chunk_of(starts_ptr, num_seqs, index, CHUNK: tl.constexpr, SEQS_PAD: tl.constexpr):
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
def of_chunks(seq_ptrs):
    """Where the starts and the rows of states begin that belong to chunks: behind those of sequences that decode."""
    starts_ptr, rows_ptr, count_ptr = seq_ptrs
    if count_ptr is not None:
        num_decodes = tl.load(count_ptr)
        starts_ptr += num_decodes
        rows_ptr += num_decodes
    return starts_ptr, rows_ptr


@triton.jit
def load_inputs(input_ptrs, begin, own, t, channel, inside, reaches_back, HEADS: tl.constexpr):
    """What the convolution reads of tokens t, of which some are before `own` if it `reaches_back`; `kept_ptr` and
    `window_ptr` are those of the sequence.
    """
    x_rows, kept_ptr, window_ptr = input_ptrs
    x_ptr, x_stride = x_rows
    VALUES: tl.constexpr = HEADS.num_values * HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * HEADS.num_keys * HEADS.key_dim + VALUES
    x = tl.load(x_ptr + t.to(tl.int64) * x_stride + channel, inside & (t >= own), 0.0)
    if reaches_back:
        slot = HEADS.conv_size - 1 + t - begin
        x += tl.load(window_ptr + slot * CHANNELS + channel, inside & (t < begin), 0.0)
        if kept_ptr is not None:
            is_kept = inside & (t >= begin) & (t < own)
            x += tl.load(kept_ptr + (t - begin) * (CHANNELS + 2 * HEADS.num_values) + channel, is_kept, 0.0)
    return x


@triton.jit
def _load_weight(weight_ptr, channel, inside, SIZE: tl.constexpr):
    """Of the convolution of some channels [channels, SIZE], in float32."""
    i = tl.arange(0, next_power_of_2(SIZE))[None, :]
    return tl.load(weight_ptr + channel[:, None] * SIZE + i, (i < SIZE) & inside[:, None], 0.0).to(tl.float32)


@triton.jit
def _convolve(input_ptrs, weight, begin, own, first, t, end, channel, inside, HEADS: tl.constexpr):
    """SiLU of the convolution [tokens, channels] of tokens t, from the `first` on, in float32."""
    tap = tl.arange(0, weight.shape[1])[None, :]
    SIZE: tl.constexpr = HEADS.conv_size
    reaches_back = first - (SIZE - 1) < own
    y = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    is_there = (t < end)[:, None] & inside[None, :]
    for i in tl.static_range(SIZE):
        before = t[:, None] - (SIZE - 1) + i
        x = load_inputs(input_ptrs, begin, own, before, channel[None, :], is_there, reaches_back, HEADS)
        y += x.to(tl.float32) * tl.sum(tl.where(tap == i, weight, 0.0), 1)[None, :]
    return silu(y)


@triton.jit
def _load_gate(ba_rows, kept_ptr, begin, own, t, end, gate, HEADS: tl.constexpr):
    ba_ptr, ba_stride = ba_rows
    GATES: tl.constexpr = 2 * HEADS.num_values
    CHANNELS: tl.constexpr = 2 * HEADS.num_keys * HEADS.key_dim + HEADS.num_values * HEADS.value_dim
    x = tl.load(ba_ptr + t.to(tl.int64) * ba_stride + gate, (t >= own) & (t < end), 0.0)
    if kept_ptr is not None:
        x += tl.load(kept_ptr + (t - begin) * (CHANNELS + GATES) + CHANNELS + gate, t < own, 0.0)
    return x.to(tl.float32)


@triton.jit
def shift_window(input_ptrs, written_ptr, begin, own, end, channel, inside, HEADS: tl.constexpr):
    """The window after the tokens before `end`; what it keeps of the one before moves to the front."""
    SIZE: tl.constexpr = HEADS.conv_size
    CHANNELS: tl.constexpr = 2 * HEADS.num_keys * HEADS.key_dim + HEADS.num_values * HEADS.value_dim
    i, channel = tl.arange(0, next_power_of_2(SIZE - 1))[:, None], channel[None, :]
    inside = (i < SIZE - 1) & inside[None, :]
    x = load_inputs(input_ptrs, begin, own, end - (SIZE - 1) + i, channel, inside, True, HEADS)
    tl.debug_barrier()  # all threads have read the window
    tl.store(written_ptr + i * CHANNELS + channel, x, inside)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_seqs", "rows_stride"])
def _inputs_kernel(
    x_rows,
    ba_rows,
    seq_ptrs,
    window_ptr,
    draft_ptrs,
    weight_ptrs,
    out_ptrs,
    num_seqs,
    rows_stride,
    L2_EPS,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes TILE tokens of a sequence, and a head: queries first, then keys, then values with their gates."""
    gdc_launch_and_wait(PDL)
    conv_ptr, a_log_ptr, dt_bias_ptr = weight_ptrs
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr = out_ptrs
    context_lens_ptr, kept_ptr, num_tokens_ptr, num_right_ptr = draft_ptrs
    NUM_KEYS: tl.constexpr = HEADS.num_keys
    NUM_VALUES: tl.constexpr = HEADS.num_values
    KEYS: tl.constexpr = NUM_KEYS * HEADS.key_dim
    VALUES: tl.constexpr = NUM_VALUES * HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    MOST: tl.constexpr = KEPT + ROWS
    head, tile = tl.program_id(0), tl.program_id(1)
    if ROWS == 0:
        starts_ptr, rows_ptr = of_chunks(seq_ptrs)
        seq, first, own, end = chunk_of(starts_ptr, num_seqs, tile, TILE, SEQS_PAD)
    else:
        _, rows_ptr, count_ptr = seq_ptrs
        TILES: tl.constexpr = (MOST + TILE - 1) // TILE
        seq = tile // TILES
        own, end = seq * ROWS, seq * ROWS + ROWS
        if count_ptr is not None:
            num_seqs = tl.load(count_ptr) // ROWS
    if seq >= num_seqs:
        return
    row = tl.load(rows_ptr + seq * rows_stride).to(tl.int64)
    begin, out_of_first = own, 0
    if ROWS > 0:
        if KEPT > 0:
            num_right = tl.load(context_lens_ptr + own) - 1 - tl.load(num_tokens_ptr + row)
            num_right = tl.minimum(tl.maximum(num_right, 0), KEPT)  # of padding it may be anything
            begin -= num_right
            kept_ptr += row * (KEPT * (CHANNELS + 2 * NUM_VALUES))
            if tile % TILES + head == 0:
                tl.store(num_right_ptr + seq, num_right)
        first = begin + tile % TILES * TILE
        out_of_first = seq * MOST - begin
    inputs = x_rows, kept_ptr, window_ptr + row * ((HEADS.conv_size - 1) * CHANNELS)
    # parts of the tokens, whose inputs fit into registers
    PART: tl.constexpr = min(TILE, 16)
    stop = tl.minimum(first + TILE, end)
    if head < 2 * NUM_KEYS:
        d = tl.arange(0, next_power_of_2(HEADS.key_dim))
        own_key, in_key = head * HEADS.key_dim + d, d < HEADS.key_dim
        key_weight = _load_weight(conv_ptr, own_key, in_key, HEADS.conv_size)
        scale = tl.where(head < NUM_KEYS, HEADS.key_dim, 1)
        target = (q_ptr if head < NUM_KEYS else k_ptr) + (head % NUM_KEYS * HEADS.key_dim + d)[None, :]
        for part in range(first, stop, PART):
            t = part + tl.arange(0, PART)
            qk = _convolve(inputs, key_weight, begin, own, part, t, end, own_key, in_key, HEADS)
            qk *= tl.rsqrt((tl.sum(qk * qk, 1) + L2_EPS) * scale)[:, None]
            out_row = (out_of_first + t).to(tl.int64)[:, None]
            tl.store(target + out_row * KEYS, qk, (t < end)[:, None] & in_key[None, :])
    else:
        head -= 2 * NUM_KEYS
        e = tl.arange(0, next_power_of_2(HEADS.value_dim))
        own_value, in_value = head * HEADS.value_dim + e, e < HEADS.value_dim
        value_weight = _load_weight(conv_ptr, 2 * KEYS + own_value, in_value, HEADS.conv_size)
        for part in range(first, stop, PART):
            t = part + tl.arange(0, PART)
            v = _convolve(inputs, value_weight, begin, own, part, t, end, 2 * KEYS + own_value, in_value, HEADS)
            out_row = (out_of_first + t).to(tl.int64)[:, None]
            tl.store(v_ptr + out_row * VALUES + own_value[None, :], v, (t < end)[:, None] & in_value[None, :])
        t = first + tl.arange(0, TILE)
        b = _load_gate(ba_rows, kept_ptr, begin, own, t, end, head, HEADS)
        a = _load_gate(ba_rows, kept_ptr, begin, own, t, end, NUM_VALUES + head, HEADS) + tl.load(dt_bias_ptr + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        decay = tl.where(t < end, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0)
        decay = tl.cumsum(decay, 0) if IS_SUMMED else tl.exp(decay)
        gate_at = (out_of_first + t).to(tl.int64) * NUM_VALUES + head
        tl.store(decay_ptr + gate_at, decay, t < end)
        tl.store(beta_ptr + gate_at, 1.0 / (1.0 + tl.exp(-b)), t < end)


class Sequences(NamedTuple):
    """What kernels read of sequences: of chunks, or of those that decode, which have `rows` each."""

    ptrs: tuple[torch.Tensor | None, ...]  # chunks' starts; rows of states to read; number of rows that decode
    number: int
    rows: int = 0
    drafts: tuple[torch.Tensor | None, ...] = (None,) * 4  # lengths; inputs that are kept; tokens in the state; right

    @property
    def num_kept(self) -> int:
        """The most drafts of the step before."""
        return 0 if self.drafts[1] is None else self.drafts[1].shape[1]

    @property
    def pad(self) -> int:
        """Two variants up to 1,024 sequences, as each is compiled."""
        return 32 if self.number <= 32 else max(1024, triton.next_power_of_2(self.number))


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What kernels take for rows [T, N] that may lie apart: where the first one is, and how far it is to the next."""
    return x, x.stride(0)


class RuleInputs(NamedTuple):
    """Of each token and head, as in layers/gated_delta_net.py; a key head once for all of its value heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor  # or within each tile, with `is_summed`, the sum of the logarithms
    beta: torch.Tensor


def rule_inputs(
    qkvz,
    ba,
    layer: Any,
    states: Any,
    seqs: Sequences,
    dtype: torch.dtype,
    tile: int,
    is_summed: bool,
    num_warps: int = 4,
) -> RuleInputs:
    """q, k and v in `dtype`. A sequence that decodes has room for all drafts of the step before, and for its rows."""
    heads, most = layer.heads, seqs.num_kept + seqs.rows
    num_tokens = seqs.number * most if seqs.rows else len(qkvz)
    num_tiles = seqs.number * triton.cdiv(most, tile) if seqs.rows else num_tokens // tile + seqs.number
    make = lambda size, dtype: torch.empty((num_tokens, size), dtype=dtype, device=qkvz.device)
    gates = (make(heads.num_values, torch.float32) for _ in range(2))
    inputs = RuleInputs(*(make(size, dtype) for size in heads.sizes), *gates)
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias
    launch(_inputs_kernel, (2 * heads.num_keys + heads.num_values, num_tiles), qkvz.device)(
        *(rows_of(qkvz), rows_of(ba), seqs.ptrs, states.tensors[0], seqs.drafts, weights, tuple(inputs)),
        *(seqs.number, seqs.ptrs[1].stride(-1), layer.l2_eps),
        HEADS=heads,
        ROWS=seqs.rows,
        KEPT=seqs.num_kept,
        TILE=tile,
        SEQS_PAD=seqs.pad,
        IS_SUMMED=is_summed,
        num_warps=num_warps,
    )
    return inputs

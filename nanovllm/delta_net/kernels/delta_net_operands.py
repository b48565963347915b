"""What the kernels of the gated delta rule know of a layer and of the sequences of a step.

Tokens of a sequence are numbered like the rows of x that they have in the step, from `own` on. Before them, from
`begin` on, may come drafts of the step before that were right, whose inputs were kept; before these comes the window.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Heads(NamedTuple):
    """The DeltaHeads of a layer, and what follows from them."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    conv_size: int
    group: int  # value heads of a key head
    keys: int  # numbers of all keys of a token, as of its queries
    values: int
    channels: int  # of the convolution: queries, keys, values
    draft: int  # numbers that are kept of a draft: channels and gates
    key_pad: int  # powers of two
    value_pad: int
    pad: int  # the larger one


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    heads: Heads
    tile: int  # tokens, value heads or values of a program
    rows: int = 0  # of a sequence that decodes; 0 for chunks
    kept: int = 0  # of the drafts of the step before, at most
    seqs_pad: int = 0  # a power of two: so many sequences may have chunks
    stages: int = 1  # of what is loaded ahead
    is_summed: bool = False  # of decays, the logarithms are summed within a tile


class Inputs(NamedTuple):
    """Of a layer, whose rows may lie apart."""

    qkvz: torch.Tensor
    stride: int
    ba: torch.Tensor
    ba_stride: int


class States(NamedTuple):
    """A State of cache/state.py."""

    windows: torch.Tensor
    matrices: torch.Tensor
    kept: torch.Tensor | None  # inputs of drafts
    num_tokens: torch.Tensor | None


class Sequences(NamedTuple):
    """What kernels read of sequences that decode, or of those with chunks."""

    rows: torch.Tensor  # of states [B]; with chunks [2, B], those that are read, and those that are written
    count: torch.Tensor | None  # how many rows decode, where there is room for more
    starts: torch.Tensor | None = None  # of chunks
    context_lens: torch.Tensor | None = None  # with drafts


@cache
def heads_of(heads: Any) -> Heads:
    keys, _, values = heads.sizes
    sizes = keys, values, 2 * keys + values, 2 * keys + values + 2 * heads.num_values
    pads = triton.next_power_of_2(heads.key_dim), triton.next_power_of_2(heads.value_dim)
    return Heads(*heads, heads.num_values // heads.num_keys, *sizes, *pads, max(pads))


def operands_of(qkvz: torch.Tensor, ba: torch.Tensor, layer: Any, states: Any) -> tuple[Heads, Inputs, States]:
    """What kernels take of a layer."""
    kept_drafts = states.kept_drafts or (None, None)
    return heads_of(layer.heads), Inputs(qkvz, qkvz.stride(0), ba, ba.stride(0)), States(*states.tensors, *kept_drafts)


def pad_of(num_seqs: int) -> int:
    """Two variants up to 1,024 sequences, as each is compiled."""
    return 32 if num_seqs <= 32 else max(1024, triton.next_power_of_2(num_seqs))


@triton.jit
def num_decode_rows(seq_ptrs):
    """How many sequences come before those with chunks."""
    return 0 if seq_ptrs.count is None else tl.load(seq_ptrs.count)


@triton.jit
def sequence_of(seq_ptrs, seq, stride, PLAN: tl.constexpr):
    """Of a sequence: its first token and the one after the last; the rows of the states that it reads and writes."""
    if PLAN.rows:
        own, end = seq * PLAN.rows, seq * PLAN.rows + PLAN.rows
        read = tl.load(seq_ptrs.rows + seq * stride)
        written = read
    else:
        seq += num_decode_rows(seq_ptrs)
        own, end = tl.load(seq_ptrs.starts + seq), tl.load(seq_ptrs.starts + seq + 1)
        read, written = tl.load(seq_ptrs.rows + seq), tl.load(seq_ptrs.rows + stride + seq)
    return own, end, read.to(tl.int64), written.to(tl.int64)


@triton.jit
def chunk_of(seq_ptrs, num_seqs, index, CHUNK: tl.constexpr, PAD: tl.constexpr):
    """Of all chunks in order, the index-th: its sequence, or a number from `num_seqs` on, and its number in that."""
    seq = tl.arange(0, PAD)
    starts_ptr = seq_ptrs.starts + num_decode_rows(seq_ptrs) + seq
    lengths = tl.load(starts_ptr + 1, seq < num_seqs, 0) - tl.load(starts_ptr, seq < num_seqs, 0)
    totals = tl.cumsum(tl.cdiv(lengths, CHUNK), 0)
    is_before = totals <= index
    return tl.sum(is_before.to(tl.int32), 0), index - tl.max(tl.where(is_before, totals, 0), 0)

"""Defines the arguments of the gated delta rule's kernels, which describe a layer and the sequences of a step.

A token's index is the number of its row in this step, not its position in the sequence. The tokens that a sequence has
in this step start at index `own`. The accepted drafts of the previous step, whose inputs were stored, have the indices
from `begin` to `own`. The convolution's window ends before index `begin`.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Heads(NamedTuple):
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    conv_size: int
    group: int  # value heads per key head
    keys: int  # elements of a token's keys, and of its queries
    values: int  # elements of a token's values
    channels: int  # of the convolution: queries, keys, values
    draft: int  # elements that are stored per draft: channels and gates
    key_pad: int  # key_dim, rounded up to a power of two
    value_pad: int  # value_dim, rounded up to a power of two
    pad: int  # the larger of the two


class Plan(NamedTuple):
    heads: Heads
    tile: int  # tokens, value heads or elements of the value per program
    rows: int = 0  # tokens of this step per decoding sequence; 0 for chunks
    kept: int = 0  # maximum number of stored drafts of the previous step
    seqs_pad: int = 0  # a power of two, at least the number of sequences with chunks
    stages: int = 1  # of the pipeline that loads ahead
    is_summed: bool = False  # whether log decays are summed within a tile


class Inputs(NamedTuple):
    """The inputs of a layer: tensors whose rows may have any stride."""

    qkvz: torch.Tensor
    stride: int
    ba: torch.Tensor
    ba_stride: int


class States(NamedTuple):
    """The tensors of a `State` (cache/state.py)."""

    windows: torch.Tensor
    matrices: torch.Tensor
    kept: torch.Tensor | None  # inputs of drafts
    num_tokens: torch.Tensor | None


class Sequences(NamedTuple):
    """The data that kernels read about the sequences of a step.

    Either all sequences decode, or all have prefill chunks.
    """

    rows: torch.Tensor  # [B], the rows of states; for chunks [2, B]: rows to read, and rows to write
    count: torch.Tensor | None  # [1] int32: the number of decode rows, if a batch is padded
    starts: torch.Tensor | None = None  # of chunks; None: decodes
    context_lens: torch.Tensor | None = None  # only with drafts


@cache
def heads_of(heads: Any) -> Heads:
    keys, _, values = heads.sizes
    sizes = keys, values, 2 * keys + values, 2 * keys + values + 2 * heads.num_values
    pads = triton.next_power_of_2(heads.key_dim), triton.next_power_of_2(heads.value_dim)
    return Heads(*heads, heads.num_values // heads.num_keys, *sizes, *pads, max(pads))


def operands_of(qkvz: torch.Tensor, ba: torch.Tensor, layer: Any, states: Any) -> tuple[Heads, Inputs, States]:
    kept_drafts = states.kept_drafts or (None, None)
    return heads_of(layer.heads), Inputs(qkvz, qkvz.stride(0), ba, ba.stride(0)), States(*states.tensors, *kept_drafts)


def pad_of(num_seqs: int) -> int:
    """Round up the number of sequences, because kernels are compiled for each rounded number.

    Numbers up to 32 become 32, and larger numbers up to 1,024 become 1,024.
    """
    return 32 if num_seqs <= 32 else max(1024, triton.next_power_of_2(num_seqs))


@triton.jit
def num_decode_rows(seq_ptrs):
    """Return the number of decode rows, which precede the rows of chunks."""
    return 0 if seq_ptrs.count is None else tl.load(seq_ptrs.count)


@triton.jit
def sequence_of(seq_ptrs, seq, stride, PLAN: tl.constexpr):
    """Return a sequence's first and end token, and the rows of the states to read and to write."""
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
    """Return (sequence, index within the sequence) for chunk number `index` of the step.

    If the step has no such chunk, the returned sequence index is `num_seqs` or more.
    """
    seq = tl.arange(0, PAD)
    starts_ptr = seq_ptrs.starts + num_decode_rows(seq_ptrs) + seq
    lengths = tl.load(starts_ptr + 1, seq < num_seqs, 0) - tl.load(starts_ptr, seq < num_seqs, 0)
    totals = tl.cumsum(tl.cdiv(lengths, CHUNK), 0)
    is_before = totals <= index
    return tl.sum(is_before.to(tl.int32), 0), index - tl.max(tl.where(is_before, totals, 0), 0)

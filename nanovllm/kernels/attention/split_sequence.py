"""How a sequence's keys are split over programs, and how their results are combined (flash-decoding)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import CacheLayout
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms

MAX_SPLITS = 32  # of each of several sequences; more take longer to combine than they save
MAX_SPLITS_OF_ONE = 64
PROGRAMS_PER_SM = 8  # two or three run at a time; with this many, the last to finish are not waited for long
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of no keys; finite, so that no NaN arises from it


def choose_num_splits(
    batch_size: int, kv_heads: int, max_keys: int, tile: int, device: torch.device, programs: int = PROGRAMS_PER_SM
) -> int:
    """The most splits of one sequence, of at least `tile` keys each. `programs` are those of a multiprocessor.

    A single sequence gets a program for each multiprocessor. The lengths of several differ: they get more programs.
    """
    programs, most = (1, MAX_SPLITS_OF_ONE) if batch_size == 1 else (programs, MAX_SPLITS)
    wanted = programs * num_sms(device) // max(1, batch_size * kv_heads)
    return max(1, min(wanted, -(-max_keys // tile), most))


@triton.jit
def split_sequence(context_lens_ptr, seq, splits, IS_QKV: tl.constexpr, ROWS: tl.constexpr, CACHE: tl.constexpr):
    """The first key of a sequence that a query of its rows sees, and how many keys are in the cache.

    Then how many keys each split reads, from the tile of the first one on, and how many splits are used. The first
    split is always used: it adds the new token, or writes the zeros of an empty sequence.
    """
    length = tl.load(context_lens_ptr + seq * ROWS + ROWS - 1)  # of the last row, which sees the most keys
    num_cached = length - (1 if IS_QKV else 0)
    first = 0
    if CACHE.window:
        shortest = length if ROWS == 1 else tl.load(context_lens_ptr + seq * ROWS)
        first = tl.maximum(shortest - CACHE.window, 0)
    num_read = num_cached - first // CACHE.tile * CACHE.tile
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_read, splits), CACHE.tile), 1) * CACHE.tile
    return first, num_cached, per_split, tl.maximum(tl.cdiv(num_read, per_split), 1)


class SplitRows(NamedTuple):
    """What is combined; a constant of the kernel."""

    heads: int
    tokens: int  # of a sequence
    is_qkv: bool  # the new token is no key in the cache yet
    max_splits: int


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(part_ptrs, seq_ptrs, out_ptr, splits, ROWS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr):
    """One row of the result. (The last split of a row to finish could do this. But a dependent launch takes less time
    than one program takes to read what many have written: it was slower, most where many heads share their keys.)
    """
    gdc_launch_dependents(PDL)
    partial_ptr, lse_ptr = part_ptrs
    num_seqs_ptr, context_lens_ptr = seq_ptrs
    row = tl.program_id(0).to(tl.int64)
    if num_seqs_ptr is not None and row >= tl.load(num_seqs_ptr) * ROWS.heads:
        return
    d = tl.arange(0, CACHE.head_dim)
    split = tl.arange(0, ROWS.max_splits)
    seq = row // (ROWS.heads * ROWS.tokens)
    num_splits = split_sequence(context_lens_ptr, seq, splits, ROWS.is_qkv, ROWS.tokens, CACHE)[3]
    is_used = split < num_splits
    part = row * splits + split
    gdc_wait(PDL)
    lse = tl.load(lse_ptr + part, is_used, NO_KEYS)
    parts = tl.load(partial_ptr + part[:, None] * CACHE.head_dim + d[None, :], is_used[:, None], 0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    out = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * CACHE.head_dim + d, out.to(out_ptr.dtype.element_ty))


def combine_splits(
    parts: tuple, seqs: tuple, out: torch.Tensor, layout: CacheLayout, is_qkv: bool, tokens_per_row: int = 1
) -> None:
    """Fill out [B, heads, head_dim] with the splits' results, which are weighted by their log-sum-exps.

    `parts` are these, [B, heads, splits, head_dim] and [B, heads, splits] float32. The other arguments are those of the
    kernel that has written them, as they tell how many splits of a sequence are used; `seqs` are num_seqs and
    context_lens.
    """
    batch_size, heads, splits = parts[1].shape
    rows = SplitRows(heads, tokens_per_row, is_qkv, max(MAX_SPLITS, triton.next_power_of_2(splits)))
    launch(_combine_kernel, (batch_size * heads,), out.device, shared=50)(
        parts, seqs, out, splits, ROWS=rows, CACHE=layout, num_warps=4 if splits > MAX_SPLITS else 2
    )

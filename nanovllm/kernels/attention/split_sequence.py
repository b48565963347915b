"""Divides the keys of a sequence among programs, and combines the programs' results (flash-decoding)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import CacheLayout
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms

MAX_SPLITS = 32  # per sequence, if there are several; combining more splits would take longer than they save
MAX_SPLITS_OF_ONE = 64
PROGRAMS_PER_SM = 8  # two or three run at a time; with more programs, the GPU waits less for the last program
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of no keys; finite, so that no NaN arises from it


def choose_num_splits(
    batch_size: int, kv_heads: int, max_keys: int, tile: int, device: torch.device, programs: int = PROGRAMS_PER_SM
) -> int:
    """Return the maximum number of splits per sequence, each with at least `tile` keys.

    If there is one sequence, each multiprocessor gets one program. If there are several sequences, each multiprocessor
    gets `programs` programs, to balance sequences of different lengths.
    """
    programs, most = (1, MAX_SPLITS_OF_ONE) if batch_size == 1 else (programs, MAX_SPLITS)
    wanted = programs * num_sms(device) // max(1, batch_size * kv_heads)
    return max(1, min(wanted, -(-max_keys // tile), most))


@triton.jit
def split_sequence(context_lens_ptr, seq, splits, IS_QKV: tl.constexpr, ROWS: tl.constexpr, CACHE: tl.constexpr):
    """Return a sequence's (first visible key, number of cached keys, keys per split, number of used splits).

    The first split begins at the tile of the first visible key. The first split is always used: its program adds the
    new token of qkv, or writes zeros for an empty sequence.
    """
    length = tl.load(context_lens_ptr + seq * ROWS + ROWS - 1)  # the last row sees the most keys
    num_cached = length - (1 if IS_QKV else 0)
    first = 0
    if CACHE.window:
        shortest = length if ROWS == 1 else tl.load(context_lens_ptr + seq * ROWS)
        first = tl.maximum(shortest - CACHE.window, 0)
    num_read = num_cached - first // CACHE.tile * CACHE.tile
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_read, splits), CACHE.tile), 1) * CACHE.tile
    return first, num_cached, per_split, tl.maximum(tl.cdiv(num_read, per_split), 1)


class SplitRows(NamedTuple):
    heads: int
    tokens: int  # query tokens per sequence
    is_qkv: bool  # the key of the new token was not in the cache when the splits started
    max_splits: int


@dependent_kernel(early=("seq_ptrs",))
@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(part_ptrs, seq_ptrs, out_ptr, splits, ROWS: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr):
    """Each program combines the splits of one query head.

    In measurements, a separate kernel was faster than an attention kernel whose last program combines the splits.
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
    """Add the results of all splits, weighted by their log-sum-exps, and store the sums in `out` [B, heads, head_dim].

    `parts` is (results [B, heads, splits, head_dim], log-sum-exps [B, heads, splits]), both float32. `seqs` is
    (num_seqs, context_lens). The number of used splits depends on the other arguments, so they must equal those of the
    kernel that wrote `parts`.
    """
    batch_size, heads, splits = parts[1].shape
    rows = SplitRows(heads, tokens_per_row, is_qkv, max(MAX_SPLITS, triton.next_power_of_2(splits)))
    launch(_combine_kernel, (batch_size * heads,), out.device, shared=50)(
        parts, seqs, out, splits, ROWS=rows, CACHE=layout, num_warps=4 if splits > MAX_SPLITS else 2
    )

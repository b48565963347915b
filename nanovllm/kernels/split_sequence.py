"""How a sequence's keys are split over programs, and how their results are combined (flash-decoding)."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch, num_sms

MAX_SPLITS = 32  # of one sequence; more take longer to combine than they save
PROGRAMS_PER_SM = 8  # two or three run at a time; with this many, the last to finish are not waited for long
NO_KEYS = tl.constexpr(-1e30)  # the log-sum-exp of no keys; finite, so that no NaN arises from it


def choose_num_splits(num_programs: int, max_context_len: int, tile: int, device: torch.device) -> int:
    """The most splits of one sequence, where there are `num_programs` sequences times kv heads.

    A split has at least `tile` keys.
    """
    wanted = PROGRAMS_PER_SM * num_sms(device) // max(1, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context_len, tile), MAX_SPLITS))


@triton.jit
def split_sequence(context_lens_ptr, seq, splits, IS_QKV: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first key of a sequence that its query sees, and how many keys are in the cache.

    Then how many keys each split reads, from the tile of the first one on, and how many splits are used. The first
    split is always used: it adds the new token, or writes the zeros of an empty sequence.
    """
    length = tl.load(context_lens_ptr + seq)
    num_cached = length - (1 if IS_QKV else 0)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    num_read = num_cached - first // TILE * TILE
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_read, splits), TILE), 1) * TILE
    return first, num_cached, per_split, tl.maximum(tl.cdiv(num_read, per_split), 1)


@dependent_kernel(early=("num_seqs_ptr", "context_lens_ptr"))
@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    num_seqs_ptr,
    context_lens_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_QKV: tl.constexpr,
    HAS_NUM_SEQS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if HAS_NUM_SEQS:
        num_rows = tl.load(num_seqs_ptr) * HEADS
        if row >= num_rows:
            return
    d = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, MAX_SPLITS)
    num_splits = split_sequence(context_lens_ptr, row // HEADS, splits, IS_QKV, TILE, WINDOW)[3]
    is_used = split < num_splits
    part = row * splits + split
    if PDL:
        gdc_wait()
    lse = tl.load(lse_ptr + part, is_used, NO_KEYS)
    parts = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], is_used[:, None], 0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    out = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty))


def combine_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    num_seqs: torch.Tensor | None,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    tile: int,
    window: int,
    is_qkv: bool,
) -> None:
    """Fill out [B, heads, head_dim] with the splits' results `partial` [B, heads, splits, head_dim] float32.

    They are weighted by their log-sum-exps `lse` [B, heads, splits]. The other arguments are those of the kernel that
    has written them, as they tell how many splits of a sequence are used.
    """
    batch_size, heads, splits, head_dim = partial.shape
    launch(_combine_kernel, (batch_size * heads,), out.device, shared=50)(
        partial,
        lse,
        num_seqs,
        context_lens,
        out,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        TILE=tile,
        MAX_SPLITS=MAX_SPLITS,
        WINDOW=window,
        IS_QKV=is_qkv,
        HAS_NUM_SEQS=num_seqs is not None,
        num_warps=2,
    )

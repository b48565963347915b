"""Kernels that meet their likes on the other ranks, and read what those have written: see distributed/peer_memory.py.

All take a `meeting`: `addresses` [ranks] int64, where each rank's memory begins in this GPU's view; the offset of what is
read and of the flags, in bytes from there; the most programs that there are flags for; `aborted` [1] int32 in pinned host
memory, by which a kernel ends before its time and with worthless results when it is not zero; and this rank. Program p of
a kernel meets program p of every other rank.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.sampling_params import is_filtered

KEYS_A_PROGRAM = 128
LOOK_UP = tl.constexpr(65536)  # tries, some milliseconds: reading the host's memory more often made long waits longer


@triton.jit
def _part_of(addresses_ptr, other, offset, dtype: tl.constexpr):
    return tl.multiple_of((tl.load(addresses_ptr + other) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _arrive(addresses_ptr, flags_offset, rank, SIZE: tl.constexpr):
    """What this GPU has written so far can be read by the others once they have met this program."""
    for other in tl.static_range(SIZE):
        if other != rank:
            theirs = _part_of(addresses_ptr, other, flags_offset, tl.int32) + tl.program_id(0) * SIZE + rank
            tl.atomic_xchg(theirs, 1, sem="release", scope="sys")


@triton.jit
def _meet(addresses_ptr, flags_offset, aborted_ptr, rank, SIZE: tl.constexpr):
    """Wait for the others; each flag is taken down by the one that it was set for, before it can be set again."""
    mine = _part_of(addresses_ptr, rank, flags_offset, tl.int32) + tl.program_id(0) * SIZE
    for other in tl.static_range(SIZE):
        if other != rank:
            missing = tl.atomic_cas(mine + other, 1, 0, sem="acquire", scope="sys") == 0
            tries = 0
            while missing:
                tries += 1
                missing = tl.atomic_cas(mine + other, 1, 0, sem="acquire", scope="sys") == 0
                if tries % LOOK_UP == 0:  # the host's memory is far
                    missing = missing & (tl.load(aborted_ptr, volatile=True) == 0)


@triton.jit(do_not_specialize=["rank", "num_rows", "offset", "flags_offset"])
def _sum_rms_norm_kernel(
    addresses_ptr,
    offset,
    flags_offset,
    aborted_ptr,
    sum_ptr,
    weight_ptr,
    out_ptr,
    rank,
    num_rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, col < N, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    _arrive(addresses_ptr, flags_offset, rank, SIZE)
    mine = _part_of(addresses_ptr, rank, offset, dtype)
    at = tl.program_id(0).to(tl.int64) * N + col
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        # what is here is loaded while the others may still be on their way
        ours = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            ours += tl.load(mine + part * num_rows * N + at, col < N, 0.0).to(tl.float32)
        x = tl.zeros([BLOCK], tl.float32)
        if HAS_RESIDUAL:
            x = tl.load(sum_ptr + at, col < N, 0.0).to(tl.float32)
        if row == tl.program_id(0):
            _meet(addresses_ptr, flags_offset, aborted_ptr, rank, SIZE)
        for other in tl.static_range(SIZE):  # in the same order on every rank, for the same sum
            theirs = _part_of(addresses_ptr, other, offset, dtype)
            y = tl.zeros([BLOCK], tl.float32)
            width = tl.where(other == rank, 0, N)
            for part in tl.static_range(PARTS):
                # past the cache next to the processor: it knows nothing of what others write
                where = theirs + part * num_rows * N + at
                y += tl.load(where, col < width, 0.0, cache_modifier=".cg").to(tl.float32)
            x += tl.where(other == rank, ours, y)
        total = x.to(dtype)
        tl.store(sum_ptr + at, total, col < N)
        x = total.to(tl.float32)
        tl.store(out_ptr + at, x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight, col < N)
        at += tl.num_programs(0) * N


def sum_rms_norm(
    mine: torch.Tensor, meeting: tuple, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all ranks' parts, of which `mine` [parts, T, N] are this one's (+ residual): its norm, and the sum, [T, N].

    `residual` [T, N] becomes the sum.
    """
    addresses, offset, flags_offset, max_programs, aborted, rank = meeting
    parts, num_rows, n = mine.shape
    total = torch.empty_like(mine[0]) if residual is None else residual
    out = torch.empty_like(total)
    block = triton.next_power_of_2(n)
    launch(_sum_rms_norm_kernel, (max(1, min(num_rows, max_programs)),), mine.device)(
        addresses,
        offset,
        flags_offset,
        aborted,
        total,
        weight,
        out,
        rank,
        num_rows,
        eps,
        N=n,
        BLOCK=block,
        PARTS=parts,
        SIZE=len(addresses),
        HAS_RESIDUAL=residual is not None,
        num_warps=max(4, min(16, block // 256)),
        num_stages=1,  # nothing is read before the ranks have met
    )
    return out, total


@triton.jit(do_not_specialize=["rank", "num_keys", "offset", "flags_offset"])
def _max_kernel(
    keys_ptr,
    addresses_ptr,
    offset,
    flags_offset,
    aborted_ptr,
    out_ptr,
    rank,
    num_keys,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.load(keys_ptr + at, at < num_keys, 0)
    tl.store(_part_of(addresses_ptr, rank, offset, tl.int64) + at, best, at < num_keys)
    tl.debug_barrier()  # one thread tells the others that all have written
    _arrive(addresses_ptr, flags_offset, rank, SIZE)
    _meet(addresses_ptr, flags_offset, aborted_ptr, rank, SIZE)
    for other in tl.static_range(SIZE):
        theirs = _part_of(addresses_ptr, other, offset, tl.int64) + at
        best = tl.maximum(best, tl.load(theirs, at < num_keys, 0, cache_modifier=".cg"))
    tl.store(out_ptr + at, best, at < num_keys)


def max_of_ranks(keys: torch.Tensor, meeting: tuple) -> torch.Tensor:
    """The largest of all ranks' keys [S] int64, each for itself; S may be 0, and the ranks meet all the same."""
    addresses, offset, flags_offset, _, aborted, rank = meeting
    out = torch.empty_like(keys)
    _max_kernel[(max(1, triton.cdiv(len(keys), KEYS_A_PROGRAM)),)](
        keys,
        addresses,
        offset,
        flags_offset,
        aborted,
        out,
        rank,
        len(keys),
        SIZE=len(addresses),
        BLOCK=KEYS_A_PROGRAM,
    )
    return out


@triton.jit(do_not_specialize=["rank", "num_rows", "offset", "flags_offset"])
def _gather_kernel(
    addresses_ptr,
    offset,
    flags_offset,
    aborted_ptr,
    asked_ptr,
    out_ptr,
    rank,
    num_rows,
    n,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    _arrive(addresses_ptr, flags_offset, rank, SIZE)
    _meet(addresses_ptr, flags_offset, aborted_ptr, rank, SIZE)
    tiles = tl.cdiv(n, BLOCK)
    col = tl.arange(0, BLOCK)
    for piece in range(tl.program_id(0), num_rows * SIZE * tiles, tl.num_programs(0)):
        row = piece // (SIZE * tiles)
        other = piece // tiles % SIZE
        at = piece % tiles * BLOCK + col
        width = n
        if asked_ptr is not None:
            width = tl.where((other == rank) | is_filtered(asked_ptr + row * WIDTH), n, 0)
        theirs = _part_of(addresses_ptr, other, offset, dtype)
        x = tl.load(theirs + row * n + at, at < width, 0.0, cache_modifier=".cg")
        tl.store(out_ptr + (row * SIZE + other) * n + at, x, at < width)


def gather_columns(mine: torch.Tensor, meeting: tuple, asked: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' columns, of which `mine` [S, n] are this one's -> [S, ranks * n].

    With `asked` [S, WIDTH] int32 (sampling_columns.py) the others' are there only in rows that are filtered. The ranks
    meet even where S is 0.
    """
    addresses, offset, flags_offset, max_programs, aborted, rank = meeting
    (num_rows, n), size, block = mine.shape, len(addresses), 2048
    out = torch.empty((num_rows, size * n), dtype=mine.dtype, device=mine.device)
    pieces = num_rows * size * triton.cdiv(n, block)
    launch(_gather_kernel, (max(1, min(pieces, max_programs)),), mine.device)(
        addresses,
        offset,
        flags_offset,
        aborted,
        asked,
        out,
        rank,
        num_rows,
        n,
        WIDTH=0 if asked is None else asked.shape[1],
        SIZE=size,
        BLOCK=block,
        num_stages=1,
    )
    return out

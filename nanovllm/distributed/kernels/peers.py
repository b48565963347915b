"""Defines kernels that read what other ranks have written to PeerMemory.

Program p of a kernel first waits for a signal from program p of the same kernel on every other rank. Then it reads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    launch_ordinary,
)
from nanovllm.kernels.sampling.column_constants import WIDTH, is_filtered

KEYS_PER_PROGRAM = 128
COLUMNS = tl.constexpr(2048)  # columns that are gathered at a time
# the number of tries (a few milliseconds) between two reads of `aborted`; more frequent reads of host memory made long
# waits longer
ABORT_CHECK_INTERVAL = tl.constexpr(65536)


class PeerBarrier(NamedTuple):
    """The locations of the ranks' data, and of the flags that signal when the data has been written."""

    addresses: torch.Tensor  # [ranks] int64: where each rank's memory begins in this GPU's address space
    data_offset: int  # where the data begins, in bytes from the beginning of a rank's memory
    flags_offset: int  # where the flags [max_programs, ranks] int32 begin, in bytes from the same address
    max_programs: int
    # [1] int32 in pinned host memory: if not 0, kernels end early, and their results are worthless
    aborted: torch.Tensor
    rank: int

    @property
    def arguments(self) -> tuple:
        return (self.addresses, self.aborted), self.data_offset, self.flags_offset, self.rank


@triton.jit
def _pointer_to_rank(addresses_ptr, other, offset, dtype: tl.constexpr):
    return tl.multiple_of((tl.load(addresses_ptr + other) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _signal(peer_ptrs, flags_offset, rank, SIZE: tl.constexpr):
    """Signal that this GPU's earlier writes can be read. Programs of the other ranks wait for this signal."""
    for other in tl.static_range(SIZE):
        if other != rank:
            theirs = _pointer_to_rank(peer_ptrs[0], other, flags_offset, tl.int32) + tl.program_id(0) * SIZE + rank
            tl.atomic_xchg(theirs, 1, sem="release", scope="sys")


@triton.jit
def _wait(peer_ptrs, flags_offset, rank, SIZE: tl.constexpr):
    """Wait until every other rank has signalled."""
    addresses_ptr, aborted_ptr = peer_ptrs
    mine = _pointer_to_rank(addresses_ptr, rank, flags_offset, tl.int32) + tl.program_id(0) * SIZE
    for other in tl.static_range(SIZE):
        if other != rank:
            missing = tl.atomic_cas(mine + other, 1, 0, sem="acquire", scope="sys") == 0
            tries = 0
            while missing:
                tries += 1
                missing = tl.atomic_cas(mine + other, 1, 0, sem="acquire", scope="sys") == 0
                if tries % ABORT_CHECK_INTERVAL == 0:  # host memory is slow to read
                    missing = missing & (tl.load(aborted_ptr, volatile=True) == 0)


class SumShape(NamedTuple):
    n: int
    width: int  # a power of two, at least n
    split_k: int
    ranks: int
    has_residual: bool


@dependent_kernel(early=("weight_ptr",))
@triton.jit(do_not_specialize=["rank", "num_rows", "offset", "flags_offset"])
def _sum_rms_norm_kernel(
    peer_ptrs, offset, flags_offset, rank, row_ptrs, weight_ptr, num_rows, eps, SHAPE: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    sum_ptr, out_ptr = row_ptrs
    N: tl.constexpr = SHAPE.n
    SIZE: tl.constexpr = SHAPE.ranks
    SPLIT_K: tl.constexpr = SHAPE.split_k
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    BLOCK: tl.constexpr = SHAPE.width
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, col < N, 0.0).to(tl.float32)
    gdc_wait(PDL)
    _signal(peer_ptrs, flags_offset, rank, SIZE)
    addresses_ptr = peer_ptrs[0]
    mine = _pointer_to_rank(addresses_ptr, rank, offset, dtype)
    at = tl.program_id(0).to(tl.int64) * N + col
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        # load this rank's own parts while the other ranks may still be writing theirs
        ours = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(SPLIT_K):
            ours += tl.load(mine + part * num_rows * N + at, col < N, 0.0).to(tl.float32)
        x = tl.zeros([BLOCK], tl.float32)
        if SHAPE.has_residual:
            x = tl.load(sum_ptr + at, col < N, 0.0).to(tl.float32)
        if row == tl.program_id(0):
            _wait(peer_ptrs, flags_offset, rank, SIZE)
        for other in tl.static_range(SIZE):  # in the same order on every rank, so that all get the same sum
            theirs = _pointer_to_rank(addresses_ptr, other, offset, dtype)
            y = tl.zeros([BLOCK], tl.float32)
            width = tl.where(other == rank, 0, N)
            for part in tl.static_range(SPLIT_K):
                # bypass the L1 cache, which is not coherent with other GPUs' writes
                where = theirs + part * num_rows * N + at
                y += tl.load(where, col < width, 0.0, cache_modifier=".cg").to(tl.float32)
            x += tl.where(other == rank, ours, y)
        total = x.to(dtype)
        tl.store(sum_ptr + at, total, col < N)
        x = total.to(tl.float32)
        tl.store(out_ptr + at, x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight, col < N)
        at += tl.num_programs(0) * N


def sum_rms_norm(
    parts: torch.Tensor, barrier: PeerBarrier, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the summands of all ranks and the residual.

    Return the RMS norm of the sum, and the sum itself, both [T, N]. `parts` [split_k, T, N] contains this rank's
    summands, at the barrier's data offset. The sum overwrites `residual` [T, N].
    """
    split_k, num_rows, n = parts.shape
    total = torch.empty_like(parts[0]) if residual is None else residual
    out = torch.empty_like(total)
    width = triton.next_power_of_2(n)
    shape = SumShape(n, width, split_k, len(barrier.addresses), residual is not None)
    # a pipeline of several stages would read the other ranks' parts before the wait
    constants = dict(SHAPE=shape, num_warps=max(4, min(16, width // 256)), num_stages=1)
    launch(_sum_rms_norm_kernel, (max(1, min(num_rows, barrier.max_programs)),), parts.device)(
        *barrier.arguments, (total, out), weight, num_rows, eps, **constants
    )
    return out, total


@triton.jit(do_not_specialize=["rank", "num_keys", "offset", "flags_offset"])
def _max_kernel(
    peer_ptrs, offset, flags_offset, rank, keys_ptr, out_ptr, num_keys, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.load(keys_ptr + at, at < num_keys, 0)
    tl.store(_pointer_to_rank(peer_ptrs[0], rank, offset, tl.int64) + at, best, at < num_keys)
    tl.debug_barrier()  # one thread signals, after all have written
    _signal(peer_ptrs, flags_offset, rank, SIZE)
    _wait(peer_ptrs, flags_offset, rank, SIZE)
    for other in tl.static_range(SIZE):
        theirs = _pointer_to_rank(peer_ptrs[0], other, offset, tl.int64) + at
        best = tl.maximum(best, tl.load(theirs, at < num_keys, 0, cache_modifier=".cg"))
    tl.store(out_ptr + at, best, at < num_keys)


def all_reduce_max(keys: torch.Tensor, barrier: PeerBarrier) -> torch.Tensor:
    """Wait for all ranks, even if S is 0. Return the elementwise maximum of their int64 keys [S]."""
    out = torch.empty_like(keys)
    launch_ordinary(_max_kernel, (max(1, triton.cdiv(len(keys), KEYS_PER_PROGRAM)),))(
        *barrier.arguments, keys, out, len(keys), SIZE=len(barrier.addresses), BLOCK=KEYS_PER_PROGRAM
    )
    return out


@dependent_kernel()
@triton.jit(do_not_specialize=["rank", "num_rows", "offset", "flags_offset"])
def _gather_kernel(
    peer_ptrs, offset, flags_offset, rank, params_ptr, out_ptr, num_rows, n, SIZE: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    _signal(peer_ptrs, flags_offset, rank, SIZE)
    _wait(peer_ptrs, flags_offset, rank, SIZE)
    tiles = tl.cdiv(n, COLUMNS)
    col = tl.arange(0, COLUMNS)
    for piece in range(tl.program_id(0), num_rows * SIZE * tiles, tl.num_programs(0)):
        row = piece // (SIZE * tiles)
        other = piece // tiles % SIZE
        at = piece % tiles * COLUMNS + col
        width = n
        if params_ptr is not None:
            width = tl.where((other == rank) | is_filtered(params_ptr + row * WIDTH), n, 0)
        theirs = _pointer_to_rank(peer_ptrs[0], other, offset, dtype)
        x = tl.load(theirs + row * n + at, at < width, 0.0, cache_modifier=".cg")
        tl.store(out_ptr + (row * SIZE + other) * n + at, x, at < width)


def gather_columns(
    mine: torch.Tensor, barrier: PeerBarrier, sampling_params: torch.Tensor | None = None
) -> torch.Tensor:
    """Wait for all ranks, even if S is 0. Return the concatenated columns of all ranks: [S, ranks * n].

    `mine` [S, n] lies at the barrier's data offset. If `sampling_params` [S, WIDTH] int32 (see sampling_columns.py) is
    given, a row without filters (such as top-p) lacks the columns of other ranks.
    """
    (num_rows, n), size = mine.shape, len(barrier.addresses)
    out = torch.empty((num_rows, size * n), dtype=mine.dtype, device=mine.device)
    pieces = num_rows * size * triton.cdiv(n, COLUMNS.value)
    launch(_gather_kernel, (max(1, min(pieces, barrier.max_programs)),), mine.device)(
        *barrier.arguments, sampling_params, out, num_rows, n, SIZE=size, num_stages=1
    )
    return out

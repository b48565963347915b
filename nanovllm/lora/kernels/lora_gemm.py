"""Adds the results of low-rank adapters to the results of a linear layer: shrink computes A x, and expand adds B (A x).

Rows with the same adapter form groups, because all rows of a tile are multiplied by the same adapter. This is the
segmented GEMM of Chen et al., "Punica: multi-tenant LoRA serving" (arXiv:2310.18547).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms

FEW_ROWS = 128  # up to this many rows, tiles have the smallest number of rows that tensor cores multiply
MAX_SPLITS = 16


class RowGroups(NamedTuple):
    """The rows of a step, sorted by slot.

    order: [T] int32, the indices of all rows. Rows without an adapter come first.
    starts: [slots + 1] int32, the index in `order` where the rows of each slot begin. The last entry is T.
    """

    order: torch.Tensor
    starts: torch.Tensor


class LoRATiles(NamedTuple):
    tile_m: int  # rows
    tile_r: int  # of the adapters' rank
    tile_k: int  # inputs
    tile_n: int  # outputs
    splits: int  # of the inputs
    slots: int  # for experts, slots * experts
    padded_slots: int  # a power of two
    experts: int
    parts: int
    max_rank: int


def group_rows(slots: torch.Tensor, num_slots: int) -> RowGroups:
    in_order, order = slots.sort(stable=True)
    bounds = torch.arange(num_slots + 1, dtype=slots.dtype, device=slots.device)
    starts = torch.searchsorted(in_order, bounds, out_int32=True)
    # this launch comes last, because kernels that read `starts` early might not see what the last launch wrote
    return RowGroups(order.int(), starts)


@triton.jit
def _rows_of_tile(starts_ptr, TILES: tl.constexpr):
    """Return this program's slot, the first index of its tile in `RowGroups.order`, and the end of the slot's rows.

    For a surplus tile, the returned slot does not exist.
    """
    tile = tl.program_id(0)
    slots = tl.arange(0, TILES.padded_slots)
    exists = slots < TILES.slots
    starts = tl.load(starts_ptr + slots, exists, 0)
    ends = tl.load(starts_ptr + slots + 1, exists, 0)
    num_tiles = (ends - starts + TILES.tile_m - 1) // TILES.tile_m
    tile_ends = tl.cumsum(num_tiles, 0)
    is_before = exists & (tile_ends <= tile)
    slot = tl.sum(is_before.to(tl.int32), 0)
    index = tile - tl.sum(tl.where(is_before, num_tiles, 0), 0)
    first = tl.sum(tl.where(slots == slot, starts, 0), 0) + index * TILES.tile_m
    return slot, first, tl.sum(tl.where(slots == slot, ends, 0), 0)


@triton.jit
def _load_a(a_ptrs, k, K, is_r):
    return tl.load(a_ptrs + k[None, :], is_r[:, None] & (k < K)[None, :], 0.0)


@dependent_kernel(early=("a_ptr", "rank_ptr", "group_ptrs"))
@triton.jit(do_not_specialize=["T"])
def _shrink_kernel(
    x_ptr, a_ptr, rank_ptr, group_ptrs, h_ptr, T, K, k_per_split, rank_stride, TILES: tl.constexpr, PDL: tl.constexpr
):
    # A program computes [tile_m, tile_r] of A x for one part, over the inputs of one split.
    gdc_launch_dependents(PDL)
    slot, first, end = _rows_of_tile(group_ptrs.starts, TILES)
    split = tl.program_id(1)
    r_tiles: tl.constexpr = (TILES.max_rank + TILES.tile_r - 1) // TILES.tile_r
    part = tl.program_id(2) // r_tiles
    r = tl.program_id(2) % r_tiles * TILES.tile_r + tl.arange(0, TILES.tile_r)
    rank = tl.load(rank_ptr + slot // TILES.experts * rank_stride + part, slot < TILES.slots, 0)
    m = first + tl.arange(0, TILES.tile_m)
    a_ptrs = a_ptr + ((slot * TILES.parts + part).to(tl.int64) * TILES.max_rank + r[:, None]) * K
    begin = split * k_per_split
    k_end = tl.minimum(begin + k_per_split, K)
    w = _load_a(a_ptrs, begin + tl.arange(0, TILES.tile_k), k_end, r < rank)
    gdc_wait(PDL)
    if tl.program_id(2) % r_tiles * TILES.tile_r < rank:
        row = tl.load(group_ptrs.order + m, m < end, 0).to(tl.int64)
        acc = tl.zeros([m.shape[0], r.shape[0]], tl.float32)
        for start in range(begin, k_end, TILES.tile_k):
            k = start + tl.arange(0, TILES.tile_k)
            x = tl.load(x_ptr + row[:, None] * K + k[None, :], (m < end)[:, None] & (k < k_end)[None, :], 0.0)
            next_w = _load_a(a_ptrs, k + TILES.tile_k, k_end, r < rank)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
            w = next_w
        h = h_ptr + ((split * TILES.parts + part).to(tl.int64) * T + m[:, None]) * TILES.max_rank + r[None, :]
        tl.store(h, acc, (m < end)[:, None] & (r < rank)[None, :])


@triton.jit
def _load_b(b_ptr, slot, n, part_end, r, rank, N, TILES: tl.constexpr):
    b = b_ptr + (slot.to(tl.int64) * N + n[:, None]) * TILES.max_rank + r[None, :]
    return tl.load(b, (n < part_end)[:, None] & (r < rank)[None, :], 0.0)


@dependent_kernel(early=("b_ptr", "rank_ptr", "part_end_ptr", "group_ptrs"))
@triton.jit(do_not_specialize=["T"])
def _expand_kernel(
    h_ptr,
    b_ptr,
    rank_ptr,
    part_end_ptr,
    group_ptrs,
    y_ptr,
    T,
    N,
    rank_stride,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program adds B h to [tile_m, tile_n] of y, whose outputs belong to one part.
    gdc_launch_dependents(PDL)
    SPLITS: tl.constexpr = TILES.splits
    slot, first, end = _rows_of_tile(group_ptrs.starts, TILES)
    part = tl.program_id(2)
    rank = tl.load(rank_ptr + slot // TILES.experts * rank_stride + part, slot < TILES.slots, 0)
    part_begin = tl.load(part_end_ptr + part - 1, part > 0, 0)
    part_end = tl.load(part_end_ptr + part)
    m = first + tl.arange(0, TILES.tile_m)
    first_n = part_begin + tl.program_id(1) * TILES.tile_n
    n = first_n + tl.arange(0, TILES.tile_n)
    r = tl.arange(0, TILES.tile_r)
    w = _load_b(b_ptr, slot, n, part_end, r, rank, N, TILES)
    gdc_wait(PDL)
    if (rank > 0) & (first_n < part_end):
        row = tl.load(group_ptrs.order + m, m < end, 0).to(tl.int64)
        y = y_ptr + row[:, None] * N + n[None, :]
        inside_y = (m < end)[:, None] & (n < part_end)[None, :]
        acc = tl.load(y, inside_y, 0.0).to(tl.float32)
        for start in range(0, rank, TILES.tile_r):
            inside = (m < end)[:, None] & (start + r < rank)[None, :]
            h = tl.zeros([m.shape[0], r.shape[0]], tl.float32)
            for split in tl.static_range(SPLITS):
                of_split = h_ptr + (split * TILES.parts + part).to(tl.int64) * T * TILES.max_rank
                h += tl.load(of_split + m[:, None] * TILES.max_rank + start + r[None, :], inside, 0.0)
            next_w = _load_b(b_ptr, slot, n, part_end, start + TILES.tile_r + r, rank, N, TILES)
            acc = tl.dot(h.to(w.dtype), w.T, acc, input_precision="ieee")
            w = next_w
        tl.store(y, acc.to(y_ptr.dtype.element_ty), inside_y)


def add_lora(y: torch.Tensor, x: torch.Tensor, stack, groups: RowGroups) -> None:
    (slots, parts, max_rank, k), n, x = stack.a.shape, stack.b.shape[1], x.contiguous()
    assert y.is_contiguous() and y.shape[1] == n
    num_rows = len(x)
    is_few = num_rows <= FEW_ROWS
    # if the rows are evenly divided among the slots, they fill the tiles
    tile_m = 16 if is_few else min(64, max(16, triton.next_power_of_2(triton.cdiv(num_rows, slots))))
    tile_r = min(64, max(16, triton.next_power_of_2(max_rank)))
    tile_k, tile_n = (256 if is_few else 128) * 2 // x.element_size(), 64 if is_few else 128
    row_tiles = min(num_rows, slots + num_rows // tile_m)  # enough for any division of the rows into groups
    # if there are few tiles, the inputs are split, so that more multiprocessors read A
    num_tiles = triton.cdiv(num_rows, tile_m) * parts
    splits = max(1, min(MAX_SPLITS, num_sms(x.device) // num_tiles, k // tile_k))
    splits = 2 ** (splits.bit_length() - 1)  # a power of two, because each number of splits needs a compiled kernel
    k_per_split = triton.cdiv(k, splits * tile_k) * tile_k
    tiles = LoRATiles(
        *(tile_m, tile_r, tile_k, tile_n, splits),
        *(slots, triton.next_power_of_2(slots), stack.experts, parts, max_rank),
    )
    h = torch.empty((splits, parts, num_rows, max_rank), dtype=torch.float32, device=x.device)
    rank_stride = stack.ranks.stride(0)
    shared = 50 if is_few else 100  # the same percentage as the kernels before and after it: see `launch`
    launch(_shrink_kernel, (row_tiles, splits, parts * triton.cdiv(max_rank, tile_r)), x.device, shared)(
        x, stack.a, stack.ranks, groups, h, num_rows, k, k_per_split, rank_stride, TILES=tiles, num_warps=4
    )
    launch(_expand_kernel, (row_tiles, triton.cdiv(stack.max_outputs, tile_n), parts), x.device, shared)(
        h,
        stack.b,
        stack.ranks,
        stack.ends,
        groups,
        y,
        num_rows,
        n,
        rank_stride,
        TILES=tiles,
        num_warps=4 if is_few else 8,
    )

"""Adds the results of low-rank adapters to a linear layer's results.

The shrink kernel computes h = A x, and the expand kernel adds B h.

If there are few rows and the weight is not quantized, the linear layer's own kernel computes A x and B h
(row_adapters.py).

Rows are grouped by adapter, because a tile multiplies all its rows by the same adapter. The kernels compute the
segmented GEMM of Chen et al., "Punica: multi-tenant LoRA serving" (arXiv:2310.18547).
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import SWIGLU
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.gated_activations import silu_and_mul
from nanovllm.kernels.linear.gemv import MAX_OUTPUTS, gemv
from nanovllm.kernels.linear.row_adapters import MAX_ROWS, UNREADY, RowAdapters, num_splits
from nanovllm.kernels.linear.split_k_gemm import TILE_N, choose_split_k, split_k_gemm
from nanovllm.kernels.linear.tiles import NO_NORM

FEW_ROWS = 128  # up to this many rows, tiles have the smallest number of rows that tensor cores multiply
MAX_SPLITS = 32
MAX_LOOPS = 16
COPIES = 8
UNREADY_ELEMENTS = 2**18  # filled at a time, because each launch takes a microsecond


class RowGroups(NamedTuple):
    """Describes the rows of a step, sorted by adapter slot.

    order: [T] int32, the indices of all rows, sorted by slot. Rows without an adapter come first.
    starts: [slots + 1] int32, the index in `order` where the rows of each slot begin. The last entry of `starts` is T.
    """

    order: torch.Tensor
    starts: torch.Tensor


class LoRATiles(NamedTuple):
    tile_m: int  # rows
    tile_k: int  # inputs
    stages: int  # tiles of inputs that are loaded ahead
    tile_r: int  # rows of A, of all parts together
    tile_n: int  # outputs
    padded_rank: int  # a power of two
    loops: int  # tiles of outputs per program of the expand kernel
    splits: int  # of the inputs
    slots: int  # for experts, slots * experts
    experts: int
    parts: int
    max_rank: int
    alignment: int  # divides the numbers of outputs of all parts


def group_rows(slots: torch.Tensor, num_slots: int) -> RowGroups:
    bounds = torch.arange(num_slots + 1, dtype=slots.dtype, device=slots.device)
    if len(slots) == 1:
        groups = RowGroups(torch.zeros_like(slots), (slots < bounds).int())
    else:
        in_order, order = slots.sort(stable=True)
        groups = RowGroups(order.int(), torch.searchsorted(in_order, bounds, out_int32=True))
    torch.zeros_like(bounds)  # an ordinary launch, because early reads might not see the last ordinary launch's results
    return groups


@triton.jit
def _rows_of_tile(starts_ptr, tile, TILES: tl.constexpr, FIRST: tl.constexpr):
    """Return a tile's slot, and two indices in `RowGroups.order`: where the tile begins, and where the slot's rows end.

    FIRST is the first slot: 0, or -1 to include the rows without an adapter. If a tile is not needed, the returned slot
    does not exist.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(TILES.slots - FIRST)
    slots = FIRST + tl.arange(0, PADDED)
    exists = slots < TILES.slots
    starts = tl.load(starts_ptr + slots, exists & (slots >= 0), 0)
    ends = tl.load(starts_ptr + slots + 1, exists, 0)
    num_tiles = (ends - starts + TILES.tile_m - 1) // TILES.tile_m
    tile_ends = tl.cumsum(num_tiles, 0)
    is_before = exists & (tile_ends <= tile)
    slot = FIRST + tl.sum(is_before.to(tl.int32), 0)
    index = tile - tl.sum(tl.where(is_before, num_tiles, 0), 0)
    first = tl.sum(tl.where(slots == slot, starts, 0), 0) + index * TILES.tile_m
    return slot, first, tl.sum(tl.where(slots == slot, ends, 0), 0)


@triton.jit
def _rank_of(rank_ptrs, slot, part, TILES: tl.constexpr):
    """Return the rank of a part's adapter, or 0 if there is no adapter."""
    rank_ptr, stride = rank_ptrs
    existing = tl.maximum(tl.minimum(slot, TILES.slots - 1), 0)
    rank = tl.load(rank_ptr + existing // TILES.experts * stride + part, part < TILES.parts, 0)
    return rank * (slot == existing).to(tl.int32)


@triton.jit
def _load_a(a, k, k_end, is_r):
    return tl.load(a + k[None, :], is_r[:, None] & (k < k_end)[None, :], 0.0)


@dependent_kernel(early=("a_ptr", "rank_ptrs", "group_ptrs"))
@triton.jit(do_not_specialize=["T"])
def _shrink_kernel(
    x_ptr, a_ptr, rank_ptrs, group_ptrs, h_ptr, T, K, k_per_split, TILES: tl.constexpr, PDL: tl.constexpr
):
    # A program computes [tile_m, tile_r] of A x over the inputs of one split. The rows of A belong to all parts.
    gdc_launch_dependents(PDL)
    ROWS: tl.constexpr = TILES.parts * TILES.max_rank
    slot, first, end = _rows_of_tile(group_ptrs.starts, tl.program_id(0), TILES, 0)
    split = tl.program_id(1)
    r = tl.program_id(2) * TILES.tile_r + tl.arange(0, TILES.tile_r)
    is_r = r % TILES.max_rank < _rank_of(rank_ptrs, slot, r // TILES.max_rank, TILES)
    m = first + tl.arange(0, TILES.tile_m)
    k = tl.arange(0, TILES.tile_k)
    a = a_ptr + (slot.to(tl.int64) * ROWS + r[:, None]) * K
    begin = split * k_per_split
    k_end = tl.minimum(begin + k_per_split, K)
    w = _load_a(a, begin + k, k_end, is_r)
    row = tl.load(group_ptrs.order + m, m < end, 0).to(tl.int64)
    gdc_wait(PDL)
    if tl.max(is_r.to(tl.int32), 0) > 0:
        is_row = (m < end)[:, None]
        x_rows = x_ptr + row[:, None] * K
        x = tl.load(x_rows + begin + k[None, :], is_row & (begin + k < k_end)[None, :], 0.0)
        acc = tl.zeros([m.shape[0], r.shape[0]], tl.float32)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        for start in tl.range(begin + TILES.tile_k, k_end, TILES.tile_k, num_stages=TILES.stages):
            x = tl.load(x_rows + start + k[None, :], is_row & (start + k < k_end)[None, :], 0.0)
            acc = tl.dot(x, _load_a(a, start + k, k_end, is_r).T, acc, input_precision="ieee")
        h = h_ptr + (split * T + m[:, None]).to(tl.int64) * ROWS + r[None, :]
        tl.store(h, acc, is_row & is_r[None, :])


@triton.jit
def _load_b(b_ptr, slot, n, is_n, rank, N, TILES: tl.constexpr):
    r = tl.arange(0, TILES.padded_rank)[None, :]
    b = b_ptr + (slot.to(tl.int64) * N + n[:, None]) * TILES.max_rank + r
    return tl.load(b, is_n[:, None] & (r < rank), 0.0)


@triton.jit
def _load_h(h_ptr, m, is_m, part, rank, T, TILES: tl.constexpr):
    """Return h = A x for one part, summed over the splits of the inputs."""
    SPLITS: tl.constexpr = TILES.splits
    PADDED_RANK: tl.constexpr = TILES.padded_rank
    r = tl.arange(0, PADDED_RANK)[None, :]
    h = tl.zeros([m.shape[0], PADDED_RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * T + m[:, None]).to(tl.int64) * (TILES.parts * TILES.max_rank) + part * TILES.max_rank + r
        h += tl.load(h_ptr + at, is_m[:, None] & (r < rank), 0.0)
    return h


@dependent_kernel(early=("b_ptr", "rank_ptrs", "part_end_ptr", "group_ptrs"))
@triton.jit(do_not_specialize=["T"])
def _expand_kernel(
    h_ptr, b_ptr, rank_ptrs, part_end_ptr, group_ptrs, y_ptr, T, N, TILES: tl.constexpr, PDL: tl.constexpr
):
    # A program adds B h to [tile_m, loops * tile_n] of y, whose outputs belong to one part.
    gdc_launch_dependents(PDL)
    ALIGNMENT: tl.constexpr = TILES.alignment
    slot, first, end = _rows_of_tile(group_ptrs.starts, tl.program_id(0), TILES, 0)
    part = tl.program_id(2)
    rank = _rank_of(rank_ptrs, slot, part, TILES)
    first_n = tl.load(part_end_ptr + part - 1, part > 0, 0) + tl.program_id(1) * (TILES.loops * TILES.tile_n)
    first_n = tl.multiple_of(first_n, ALIGNMENT)  # so that loads are wide
    end_n = tl.minimum(tl.load(part_end_ptr + part), first_n + TILES.loops * TILES.tile_n)
    end_n = tl.multiple_of(end_n, ALIGNMENT)
    m = first + tl.arange(0, TILES.tile_m)
    n = first_n + tl.arange(0, TILES.tile_n)
    w = _load_b(b_ptr, slot, n, n < end_n, rank, N, TILES)
    is_m = m < end
    row = tl.load(group_ptrs.order + m, is_m, 0).to(tl.int64)
    gdc_wait(PDL)
    if (rank > 0) & (first_n < end_n):
        y = tl.load(y_ptr + row[:, None] * N + n[None, :], is_m[:, None] & (n < end_n)[None, :], 0.0)
        h = _load_h(h_ptr, m, is_m, part, rank, T, TILES).to(w.dtype)
        for begin in range(first_n, end_n, TILES.tile_n):
            n = tl.multiple_of(begin, ALIGNMENT) + tl.arange(0, TILES.tile_n)
            next_n = n + TILES.tile_n
            next_w = _load_b(b_ptr, slot, next_n, next_n < end_n, rank, N, TILES)
            next_y = tl.load(y_ptr + row[:, None] * N + next_n[None, :], is_m[:, None] & (next_n < end_n)[None, :], 0.0)
            result = tl.dot(h, w.T, y.to(tl.float32), input_precision="ieee").to(y.dtype)
            tl.store(y_ptr + row[:, None] * N + n[None, :], result, is_m[:, None] & (n < end_n)[None, :])
            w, y = next_w, next_y


@dependent_kernel(early=("rank_ptrs", "group_ptrs"))
@triton.jit(do_not_specialize=["T"])
def _expand_swiglu_kernel(
    h_ptr, b_ptr, rank_ptrs, group_ptrs, y_ptr, out_ptr, T, N, TILES: tl.constexpr, PDL: tl.constexpr
):
    # A program computes [tile_m, tile_n] of SwiGLU, even for rows without an adapter.
    gdc_launch_dependents(PDL)
    ALIGNMENT: tl.constexpr = TILES.alignment
    half = tl.multiple_of(N // 2, ALIGNMENT)
    slot, first, end = _rows_of_tile(group_ptrs.starts, tl.program_id(0), TILES, -1)
    rank, up_rank = _rank_of(rank_ptrs, slot, 0, TILES), _rank_of(rank_ptrs, slot, 1, TILES)
    m = first + tl.arange(0, TILES.tile_m)
    is_m = m < end
    row = tl.load(group_ptrs.order + m, is_m, 0).to(tl.int64)
    gdc_wait(PDL)
    if first < end:
        dtype = out_ptr.dtype.element_ty
        h = _load_h(h_ptr, m, is_m, 0, rank, T, TILES).to(dtype)
        up_h = _load_h(h_ptr, m, is_m, 1, up_rank, T, TILES).to(dtype)
        n = tl.program_id(1) * TILES.tile_n + tl.arange(0, TILES.tile_n)
        is_n = n < half
        inside = is_m[:, None] & is_n[None, :]
        y = y_ptr + row[:, None] * N + n[None, :]
        w = _load_b(b_ptr, slot, n, is_n, rank, N, TILES)
        up_w = _load_b(b_ptr, slot, half + n, is_n, up_rank, N, TILES)
        gate = tl.dot(h, w.T, tl.load(y, inside, 0.0).to(tl.float32), input_precision="ieee")
        up = tl.dot(up_h, up_w.T, tl.load(y + half, inside, 0.0).to(tl.float32), input_precision="ieee")
        gate = gate.to(dtype).to(tl.float32)  # rounded as in separate kernels
        result = activate(gate, 1.0, None).to(dtype) * up.to(dtype)
        tl.store(out_ptr + row[:, None] * half + n[None, :], result, inside)


def _tiles_of(x: torch.Tensor, stack, gated: bool = False) -> LoRATiles:
    """Return the tile sizes that were fastest on an H200."""
    (slots, parts, max_rank, k), num_rows = stack.a.shape, len(x)
    is_few, size, sms = num_rows <= FEW_ROWS, x.element_size(), num_sms(x.device)
    padded_rank = max(16, triton.next_power_of_2(max_rank))
    # if the rows are evenly divided among the slots, the tiles are full
    max_tile_m = 16 if is_few else min(64, 8192 // padded_rank)
    tile_m = min(max_tile_m, max(16, triton.next_power_of_2(triton.cdiv(num_rows, slots))))
    tile_r = min(64, max(16, triton.next_power_of_2(parts * max_rank)))
    # with few rows, programs take little memory, so that they start while the previous kernel runs
    tile_k, stages, min_steps = (512 // size, 1, 1) if is_few else (256 // size, 3, 8)
    tile_n = max(16, min(64 if is_few or gated else 128, 2**14 // (size * padded_rank)))
    # if there are few tiles, the inputs are split, so that more multiprocessors read A
    row_tiles = triton.cdiv(num_rows, tile_m)
    num_tiles = row_tiles * triton.cdiv(parts * max_rank, tile_r)
    splits = min(MAX_SPLITS if num_rows == 1 else MAX_SPLITS // 4, sms // num_tiles, k // (min_steps * tile_k))
    loops = 1 if gated else row_tiles * triton.cdiv(stack.b.shape[1], tile_n) // (8 * sms)
    # powers of two, because each value needs a compiled kernel
    splits, loops = (2 ** (max(1, number).bit_length() - 1) for number in (splits, min(MAX_LOOPS, loops)))
    sizes = slots, stack.experts, parts, max_rank, stack.alignment
    return LoRATiles(tile_m, tile_k, stages, tile_r, tile_n, padded_rank, loops, splits, *sizes)


def _shrink(x: torch.Tensor, stack, groups: RowGroups, tiles: LoRATiles) -> torch.Tensor:
    """Return h = A x as partial sums [splits, T, parts * R]. The rows of h are in the order of the groups."""
    num_rows, k = x.shape
    h = torch.empty((tiles.splits, num_rows, tiles.parts * tiles.max_rank), dtype=torch.float32, device=x.device)
    ranks, shared = (stack.ranks, stack.ranks.stride(0)), _shared(num_rows)
    grid = _num_row_tiles(num_rows, tiles), tiles.splits, triton.cdiv(h.shape[2], tiles.tile_r)
    k_per_split = triton.cdiv(k, tiles.splits * tiles.tile_k) * tiles.tile_k
    run = launch(_shrink_kernel, grid, x.device, shared)
    own = tiles._replace(tile_n=0, loops=0)  # unused, so the kernel is not compiled for each of their values
    run(x, stack.a, ranks, groups, h, num_rows, k, k_per_split, TILES=own, num_warps=4)
    return h


def _num_row_tiles(num_rows: int, tiles: LoRATiles) -> int:
    """Return a number of row tiles that is enough for any grouping of the rows."""
    return min(num_rows, num_rows // tiles.tile_m + tiles.slots)


def _shared(num_rows: int) -> int:
    """Return the percentage of shared memory that the preceding and following kernels use: see `launch`."""
    return 50 if num_rows <= FEW_ROWS else 100


def add_lora(y: torch.Tensor, x: torch.Tensor, stack, rows, gated: bool = False) -> torch.Tensor:
    x, n, num_rows, groups = x.contiguous(), stack.b.shape[1], len(x), rows.groups
    assert y.is_contiguous() and y.shape[1] == n
    tiles = _tiles_of(x, stack, gated)
    h = _shrink(x, stack, groups, tiles)
    ranks, columns = (stack.ranks, stack.ranks.stride(0)), tiles.loops * tiles.tile_n
    constants = dict(TILES=tiles, num_warps=8 if tiles.tile_m > 32 else 4)
    if gated:
        out = torch.empty((num_rows, n // 2), dtype=y.dtype, device=y.device)
        grid = _num_row_tiles(num_rows, tiles) + 1, triton.cdiv(n // 2, columns)
        run = launch(_expand_swiglu_kernel, grid, x.device, _shared(num_rows))
        run(h, stack.b, ranks, groups, y, out, num_rows, n, **constants)
        return out
    grid = _num_row_tiles(num_rows, tiles), triton.cdiv(stack.max_outputs, columns), tiles.parts
    run = launch(_expand_kernel, grid, x.device, _shared(num_rows))
    run(h, stack.b, ranks, stack.ends, groups, y, num_rows, n, **constants)
    return y


def adapted_linear(x, weight, bias, stack, rows, gated=False, split_k=1, out=None):
    """If there are few rows, the kernel of the linear layer also computes A x and B h."""
    if len(x) > MAX_ROWS.value or stack.experts > 1:
        return NotImplemented
    if len(x) == 1:
        return _adapted_row(x, weight, bias, stack, rows, gated, out)
    x = _tensor_of(x)
    if bias is not None or (len(stack.ends) > 1 and stack.alignment % TILE_N):
        return NotImplemented
    if split_k == 1 and not choose_split_k(x, weight, 1):
        return NotImplemented
    y = split_k_gemm(x, weight, split_k, out, _row_adapters(x, stack, rows))
    return y if split_k > 1 else silu_and_mul(y[0]) if gated else y[0]


def _tensor_of(x) -> torch.Tensor:
    return (x if isinstance(x, torch.Tensor) else x.tensor()).contiguous()


def _adapted_row(x, weight, bias, stack, rows, gated, out):
    summands = None if isinstance(x, torch.Tensor) else x.summands()
    row, residual = (_tensor_of(x), None) if summands is None else summands
    if stack.alignment < MAX_OUTPUTS:
        return NotImplemented
    norm = NO_NORM if summands is None else (x.weight, x.eps)
    adapters = _row_adapters(row, stack, rows)
    out = None if out is None else out[0]
    y, total = gemv(row, weight, norm, residual, SWIGLU if gated else None, bias, out, adapters)
    if summands is not None:
        x.total = total
    return y


def _row_adapters(x: torch.Tensor, stack, rows) -> RowAdapters:
    _, parts, max_rank, k = stack.a.shape
    copies = COPIES if len(x) == 1 else 1
    h = _unready(rows, (copies, num_splits(k, max_rank), len(x), parts, max_rank), x.device)
    return RowAdapters(x, stack.a, stack.b, rows.slots, stack.ranks, stack.ends, h)


def _unready(rows, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return memory that is filled with UNREADY, and that nothing else uses in this step."""
    size = triton.cdiv(math.prod(shape), 64) * 64  # so that all addresses are aligned equally
    if rows.unready is None or len(rows.unready) < size:
        rows.unready = torch.full((max(size, UNREADY_ELEMENTS),), UNREADY.value, dtype=torch.int32, device=device)
    taken, rows.unready = rows.unready[:size], rows.unready[size:]
    return taken[: math.prod(shape)].view(shape)

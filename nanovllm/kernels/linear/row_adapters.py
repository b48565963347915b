"""Computes low-rank adapters (see lora/) in the kernel of a linear layer, for steps with few rows.

The first programs of the kernel compute h = A x. Each of the other programs multiplies a part of the weight by x, waits
for h, and adds B h. Before the launch, all elements of h have the value UNREADY, so that a program can wait for the
elements that it needs. GPUs start programs in the order of their ids, so no program waits for a program that can't
start.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import gdc_wait, next_power_of_2

MAX_ROWS = tl.constexpr(16)
UNREADY = tl.constexpr(-1)  # the bits of a NaN that no computation of a GPU returns
MIN_K_PER_SPLIT = 1024
MAX_SPLITS = 16
MAX_COLUMNS = 512  # of a single row
MIN_COLUMNS = 64  # so that each element of a tile belongs to one thread: see `load_h`


class RowAdapters(NamedTuple):
    """The adapters of up to MAX_ROWS rows of a step.

    The linear layer may consist of several merged layers, such as q, k and v. An adapter has one part for each of the
    layers that were merged. A rank of 0 means that the adapter does not change the part's outputs. All outputs that a
    program computes must belong to a single part.
    """

    x: torch.Tensor  # [T, inputs]
    a: torch.Tensor  # [slots, parts, R, inputs]
    b: torch.Tensor  # [slots, outputs, R]
    slots: torch.Tensor  # [T] int32; negative without an adapter
    ranks: torch.Tensor  # [slots, parts] int32
    ends: torch.Tensor  # [parts] int32: the index after a part's last output
    h: torch.Tensor  # [copies, splits, T, parts, R] int32: receives summands of A x; UNREADY before the launch

    @property
    def shape(self) -> "AdapterShape":
        (_, parts, max_rank, k), (copies, splits, num_rows) = self.a.shape, self.h.shape[:3]
        if num_rows == 1:
            columns = max(MIN_COLUMNS, triton.next_power_of_2(splits * max_rank))
        else:
            columns = 128 if num_rows * max_rank <= 128 else 256
        return AdapterShape(parts, max_rank, self.ranks.stride(0), splits, k, triton.cdiv(k, splits), columns, copies)

    @property
    def num_programs(self) -> int:
        """Return how many programs compute h."""
        _, splits, num_rows, parts, max_rank = self.h.shape
        return splits * num_rows * triton.cdiv(parts * max_rank, self.shape.tile_r)


class AdapterShape(NamedTuple):
    parts: int
    max_rank: int
    rank_stride: int  # between the ranks of adjacent slots
    splits: int  # of the inputs
    k: int  # inputs
    k_per_split: int
    columns: int  # of a tile of B: see `load_row` and `load_columns`
    copies: int  # of h
    tile_r: int = 16  # rows of A
    tile_k: int = 512  # inputs


@triton.jit
def load_slot(adapter_ptrs, row, is_row, part, SHAPE: tl.constexpr):
    """Return the slot of a row's adapter, and the rank of one part of the adapter. Without an adapter, both are 0."""
    slot = tl.load(adapter_ptrs.slots + row, is_row, -1)
    existing = tl.maximum(slot, 0)
    rank = tl.load(adapter_ptrs.ranks + existing * SHAPE.rank_stride + part, is_row, 0)
    return existing.to(tl.int64), rank * (slot == existing).to(tl.int32)


@triton.jit
def _load_x(x_ptr, residual_ptr, norm_ptr, k, inside):
    x = tl.load(x_ptr + k, inside, 0.0)
    if residual_ptr is not None:
        total = x.to(tl.float32) + tl.load(residual_ptr + k, inside, 0.0).to(tl.float32)
        x = total.to(x.dtype)
    x = x.to(tl.float32)
    if norm_ptr is not None:
        x *= tl.load(norm_ptr + k, inside, 0.0).to(tl.float32)
    return x[None, :]


@triton.jit
def compute_h(adapter_ptrs, residual_ptr, norm_ptr, program, M, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Compute tile_r elements of A x for one row and one split of the inputs, in one of the first programs."""
    ROWS: tl.constexpr = SHAPE.parts * SHAPE.max_rank
    R_TILES: tl.constexpr = (ROWS + SHAPE.tile_r - 1) // SHAPE.tile_r
    r = program % R_TILES * SHAPE.tile_r + tl.arange(0, SHAPE.tile_r)
    split = program // R_TILES % SHAPE.splits
    row = program // (R_TILES * SHAPE.splits)
    slot, rank = load_slot(adapter_ptrs, row + 0 * r, r < ROWS, r // SHAPE.max_rank, SHAPE)
    is_r = (r % SHAPE.max_rank < rank)[:, None]
    begin = split * SHAPE.k_per_split
    end = tl.minimum(begin + SHAPE.k_per_split, SHAPE.k)
    k = begin + tl.arange(0, SHAPE.tile_k)
    a = adapter_ptrs.a + ((slot * ROWS + r) * SHAPE.k)[:, None] + k[None, :]
    a_tile = tl.load(a, is_r & (k < end)[None, :], 0.0).to(tl.float32)
    gdc_wait(PDL)
    if tl.max(rank, 0) > 0:
        x = adapter_ptrs.x + row * SHAPE.k
        acc = a_tile * _load_x(x, residual_ptr, norm_ptr, k, k < end)
        for start in range(SHAPE.tile_k, SHAPE.k_per_split, SHAPE.tile_k):
            inside = start + k < end
            a_tile = tl.load(a + start, is_r & inside[None, :], 0.0).to(tl.float32)
            acc += a_tile * _load_x(x, residual_ptr, norm_ptr, start + k, inside)
        copy = tl.arange(0, SHAPE.copies)[:, None]
        h = adapter_ptrs.h + ((copy * SHAPE.splits + split) * M + row) * ROWS + r[None, :]
        bits = tl.sum(acc, 1).to(tl.int32, bitcast=True)[None, :] + 0 * copy
        # an atomic exchange, because other programs read the elements while this kernel runs
        tl.atomic_xchg(h, bits, (r % SHAPE.max_rank < rank)[None, :] & (copy >= 0), sem="relaxed")


@triton.jit
def load_h(h_ptrs, inside):
    """Load the bits of h, which may be UNREADY.

    A tile must have at least as many elements as the program has threads. With a smaller tile, several threads would
    load the same element at different times, and `wait_for_h` would examine the value of only one thread.
    """
    return tl.load(h_ptrs, inside, 0, volatile=True)


@triton.jit
def wait_for_h(bits, h_ptrs, inside):
    """Return h as soon as all elements are ready. `bits` was returned by `load_h`."""
    while tl.max(tl.ravel((bits == UNREADY).to(tl.int32)), 0) > 0:
        bits = load_h(h_ptrs, inside)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def part_of(adapter_ptrs, n, SHAPE: tl.constexpr):
    """Return the index of the part that contains output n."""
    PARTS: tl.constexpr = SHAPE.parts
    part = 0 * n
    for i in tl.static_range(PARTS - 1):
        part += (n >= tl.load(adapter_ptrs.ends + i)).to(tl.int32)
    return part


@triton.jit
def load_row(adapter_ptrs, part, n, is_n, N, SHAPE: tl.constexpr):
    """Load a tile [tile_n, columns] of the matrix B of a single row, for the outputs `n` of one part.

    A column belongs to a row of A and to a split of the inputs. Return the tile, the matching indices in a copy of h, a
    mask of the elements that exist, and the rank.
    """
    slot, rank = load_slot(adapter_ptrs, 0, True, part, SHAPE)
    column = tl.arange(0, SHAPE.columns)
    split, r = column // SHAPE.max_rank, column % SHAPE.max_rank
    inside = is_n[:, None] & ((r < rank) & (split < SHAPE.splits))[None, :]
    b = adapter_ptrs.b + (slot * N + n[:, None]) * SHAPE.max_rank + r[None, :]
    at = ((split * SHAPE.parts + part) * SHAPE.max_rank + r)[None, :] + 0 * n[:, None]
    return tl.load(b, inside, 0.0), at, inside, rank


@triton.jit
def result_of_row(adapter_ptrs, loaded, program, SHAPE: tl.constexpr):
    """Return B h for the outputs of the tile that `load_row` has returned."""
    b, at, inside, rank = loaded
    y = tl.zeros([b.shape[0]], tl.float32)
    if rank > 0:
        # programs read different copies, because reading one cache line everywhere takes longer than the matmul
        copy = program % SHAPE.copies * (SHAPE.splits * SHAPE.parts * SHAPE.max_rank)
        h_ptrs = adapter_ptrs.h + copy + at
        h = wait_for_h(load_h(h_ptrs, inside), h_ptrs, inside)
        y = tl.sum(b.to(tl.float32) * h, 1)
    return y


@triton.jit
def has_adapters(adapter_ptrs, M):
    row = tl.arange(0, MAX_ROWS)
    return tl.max(tl.load(adapter_ptrs.slots + row, row < M, -1), 0) >= 0


@triton.jit
def load_columns(adapter_ptrs, begin, part, n, is_n, N, M, SHAPE: tl.constexpr):
    """Load a tile [tile_n, columns] of the matrices B of all rows, side by side, for the outputs `n` of one part.

    A column belongs to a row of x and to a row of A. Return the tile, the addresses of h [splits, columns], a mask of
    the addresses that exist, and each column's row of x.
    """
    column = begin + tl.arange(0, SHAPE.columns)
    row, r = column // SHAPE.max_rank, column % SHAPE.max_rank
    slot, rank = load_slot(adapter_ptrs, row, row < M, part, SHAPE)
    inside = (r < rank)[None, :]
    b = adapter_ptrs.b + ((slot * N)[None, :] + n[:, None]) * SHAPE.max_rank + r[None, :]
    split = tl.arange(0, next_power_of_2(SHAPE.splits))[:, None]
    h = adapter_ptrs.h + ((split * M + row[None, :]) * SHAPE.parts + part) * SHAPE.max_rank + r[None, :]
    return tl.load(b, is_n[:, None] & inside, 0.0), h, inside & (split < SHAPE.splits), row


@triton.jit
def _add_columns(acc, bits, loaded):
    b, h_ptrs, inside, row = loaded
    h = tl.sum(wait_for_h(bits, h_ptrs, inside), 0).to(b.dtype)
    is_own = row[:, None] == tl.arange(0, acc.shape[1])[None, :]
    return tl.dot(b, tl.where(is_own, h[:, None], 0.0), acc, input_precision="ieee")


@triton.jit
def add_results(acc, adapter_ptrs, bits, columns, adds, part, n, is_n, N, M, SHAPE: tl.constexpr):
    """If `adds` is True, return acc [tile_n, tile_m] plus B h of all rows. Column m of acc belongs to row m of x.

    `columns` is the result of the first call of `load_columns`, and `bits` is that of the first call of `load_h`.
    """
    if adds:
        acc = _add_columns(acc, bits, columns)
        for begin in range(SHAPE.columns, M * SHAPE.max_rank, SHAPE.columns):
            columns = load_columns(adapter_ptrs, begin, part, n, is_n, N, M, SHAPE)
            acc = _add_columns(acc, load_h(columns[1], columns[2]), columns)
    return acc


def num_splits(num_inputs: int, max_rank: int) -> int:
    """Return the number of ranges into which the inputs are split.

    Different programs multiply different ranges by A.
    """
    return max(1, min(MAX_SPLITS, MAX_COLUMNS // max_rank, num_inputs // MIN_K_PER_SPLIT))

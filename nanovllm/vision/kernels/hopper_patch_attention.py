"""Computes the attention of image patches on Hopper. The kernel is written in Gluon, like hopper_prefill.py.

The heads of vision towers have 72 columns, but the sizes of tiles are powers of two. Each tile of queries, keys or
values therefore has a wide part of 64 columns and a second part of 16 columns. The second part is filled up with zeros.
A library's attention kernel would compute as if the heads had 128 columns.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.attention.paged_cache import LOG2_E
from nanovllm.kernels.hopper.hopper_prefill import rows_of, softmax, sums_by_thread
from nanovllm.kernels.hopper.hopper_ring import barriers, buffers, gdc_launch_dependents, gdc_wait, sums_of, tiles_of
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms

WIDE = gl.constexpr(64)
REST = gl.constexpr(16)
TILE = gl.constexpr(128)  # patches: queries of both warpgroups, or keys


class Shape(NamedTuple):
    heads: int
    head_dim: int
    scale: float  # the factor of the scores times log2(e), for exp2
    tile: int = TILE.value
    window: int = 0  # none; `softmax` reads this field


@gluon.jit
def _work(index, count, SHAPE: gl.constexpr):
    """Return a tile's image, head and first patch. A tile contains queries. `count` is the number of tiles per image.

    Adjacent tiles belong to the same head of the same image, so that programs share keys and values.
    """
    column = index // count
    return column // SHAPE.heads, column % SHAPE.heads, index % count * SHAPE.tile


@gluon.jit
def _load(ring, buffer, use, tiles, image, patch, column):
    """Wait until `buffer` is free, and then start to load both parts of a tile.

    `use` counts the loads into `buffer`.
    """
    wide, rest, full, empty = ring
    wide_tiles, rest_tiles = tiles
    mbarrier.wait(empty.index(buffer), (use & 1) ^ 1)
    mbarrier.expect(full.index(buffer), wide_tiles.block_type.nbytes + rest_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(wide_tiles, [image, patch, column, 0], full.index(buffer), wide.index(buffer))
    tma.async_copy_global_to_shared(rest_tiles, [image, patch, column, WIDE], full.index(buffer), rest.index(buffer))


@gluon.jit
def _load_tiles(tiles, rings, num_images, num_patches, SHAPE: gl.constexpr):
    """Run the loading warp, which loads queries, and then keys and values from the last tile to the first tile."""
    queries, keys, values = rings
    count = (num_patches + SHAPE.tile - 1) // SHAPE.tile
    index, n, i = gl.program_id(0), 0, 0
    while index < count * SHAPE.heads * num_images:
        image, head, first = _work(index, count, SHAPE)
        _load(queries, 0, n, tiles, image, first, head)
        for j in range(count):
            patch = (count - 1 - j) * SHAPE.tile
            _load(keys, i % 2, i // 2, tiles, image, patch, SHAPE.heads + head)
            _load(values, i % 2, i // 2, tiles, image, patch, 2 * SHAPE.heads + head)
            i += 1
        index += gl.num_programs(0)
        n += 1


@gluon.jit
def _part(ring, buffer, PART: gl.constexpr, COLUMNS: gl.constexpr):
    return ring[PART].index(buffer).reshape([TILE, COLUMNS])


@gluon.jit
def _scores(q, keys, i, SHAPE: gl.constexpr):
    """Start to multiply the queries by the i-th tile of keys, which must already be loaded."""
    zeros = gl.full([64, SHAPE.tile], 0.0, gl.float32, sums_of(SHAPE.tile))
    wide = _part(keys, i % 2, 0, WIDE).permute((1, 0))
    rest = _part(keys, i % 2, 1, REST).permute((1, 0))
    scores = hopper.warpgroup_mma(q[0], wide, zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q[1], rest, scores, is_async=True)


@gluon.jit
def _add_values(sums, p, values, i):
    """Start to multiply the weights p by the i-th tile of values, and to add the results to both parts of `sums`."""
    wide_sums, rest_sums = sums
    p = p.to(values[0].dtype)
    wide_p = gl.convert_layout(p, gl.DotOperandLayout(0, sums_of(WIDE), 2))
    rest_p = gl.convert_layout(p, gl.DotOperandLayout(0, sums_of(REST), 2))
    mbarrier.wait(values[2].index(i % 2), i // 2 & 1)
    wide_sums = hopper.warpgroup_mma(wide_p, _part(values, i % 2, 0, WIDE), wide_sums, is_async=True)
    rest_sums = hopper.warpgroup_mma(rest_p, _part(values, i % 2, 1, REST), rest_sums, is_async=True)
    return wide_sums, rest_sums, wide_p, rest_p


@gluon.jit
def _scaled(sums, factor):
    """Multiply each row of `sums` by the row's factor."""
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def _store(out_ptr, sums, work, row, num_patches, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """Store sums [64, columns] as the elements FIRST to FIRST + columns - 1 of a head's output.

    `row` is the first row's index in a tile of queries.
    """
    image, head, patch = work
    ROWS: gl.constexpr = rows_of(sums.shape[1])
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), ROWS)
    patches = patch + row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    d = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, ROWS))
    rows = image.to(gl.int64) * num_patches + patches
    at = rows[:, None] * (SHAPE.heads * SHAPE.head_dim) + (head * SHAPE.head_dim + d)[None, :]
    gl.store(out_ptr + at, out, (patches < num_patches)[:, None] & (d < SHAPE.head_dim)[None, :])


@gluon.jit
def _compute(out_ptr, rings, turns, num_images, num_patches, W: gl.constexpr, SHAPE: gl.constexpr):
    """Run one warpgroup: compute softmax(q k^T) v for 64 rows of each query tile."""
    queries, keys, values = rings
    row_of_scores: gl.constexpr = gl.SliceLayout(1, sums_of(SHAPE.tile))
    q = _part(queries, 0, 0, WIDE).slice(W * 64, 64), _part(queries, 0, 1, REST).slice(W * 64, 64)
    count = (num_patches + SHAPE.tile - 1) // SHAPE.tile
    last = gl.full([64], 0, gl.int32, row_of_scores) + num_patches - 1
    if W == 1:
        mbarrier.arrive(turns.index(0), count=1)
    index, n, i = gl.program_id(0), 0, 0
    while index < count * SHAPE.heads * num_images:
        mbarrier.wait(queries[2].index(0), n & 1)
        mbarrier.wait(keys[2].index(i % 2), i // 2 & 1)
        mbarrier.wait(turns.index(W), i & 1)
        scores = _scores(q, keys, i, SHAPE)
        mbarrier.arrive(turns.index(1 - W), count=1)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys[3].index(i % 2), count=1)
        state = gl.full([64], -1e30, gl.float32, row_of_scores), gl.full([64, 4], 0.0, gl.float32, sums_by_thread())
        p, _, state = softmax(scores, state, last, (count - 1) * SHAPE.tile, True, SHAPE)  # the last tile may be short
        mbarrier.wait(keys[2].index((i + 1) % 2), (i + 1) // 2 & 1, pred=count > 1)
        wide = gl.full([64, WIDE], 0.0, gl.float32, sums_of(WIDE))
        rest = gl.full([64, REST], 0.0, gl.float32, sums_of(REST))
        for j in range(1, count):
            i += 1
            mbarrier.wait(turns.index(W), i & 1)
            scores = _scores(q, keys, i, SHAPE)
            wide, rest, wide_p, rest_p = _add_values((wide, rest), p, values, i - 1)
            mbarrier.arrive(turns.index(1 - W), count=1)
            scores = hopper.warpgroup_mma_wait(2, deps=[scores])
            mbarrier.arrive(keys[3].index(i % 2), count=1)
            p, alpha, state = softmax(scores, state, last, 0, False, SHAPE)
            # this wait keeps the compiler from moving softmax after the wait for the matmul
            mbarrier.wait(keys[2].index((i + 1) % 2), (i + 1) // 2 & 1, pred=j + 1 < count)
            wide, rest, wide_p, rest_p = hopper.warpgroup_mma_wait(0, deps=[wide, rest, wide_p, rest_p])
            mbarrier.arrive(values[3].index((i - 1) % 2), count=1)
            wide, rest = _scaled(wide, alpha), _scaled(rest, alpha)
        mbarrier.arrive(queries[3].index(0), count=1)
        wide, rest, wide_p, rest_p = _add_values((wide, rest), p, values, i)
        factor = 1.0 / gl.sum(state[1], 1)
        wide, rest, wide_p, rest_p = hopper.warpgroup_mma_wait(0, deps=[wide, rest, wide_p, rest_p])
        mbarrier.arrive(values[3].index(i % 2), count=1)
        work = _work(index, count, SHAPE)
        _store(out_ptr, _scaled(wide, factor), work, W * 64, num_patches, 0, SHAPE)
        _store(out_ptr, _scaled(rest, factor), work, W * 64, num_patches, WIDE, SHAPE)
        index += gl.num_programs(0)
        i += 1
        n += 1


@dependent_kernel()
@gluon.jit(do_not_specialize=["num_images", "num_patches"])
def _patch_attention_kernel(
    wide_tiles, rest_tiles, out_ptr, num_images, num_patches, SHAPE: gl.constexpr, PDL: gl.constexpr
):
    # A program loops over tiles of queries.
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    queries = buffers(wide_tiles, 1), buffers(rest_tiles, 1), barriers(1, 1), barriers(1, 2)
    keys = buffers(wide_tiles, 2), buffers(rest_tiles, 2), barriers(2, 1), barriers(2, 2)
    values = buffers(wide_tiles, 2), buffers(rest_tiles, 2), barriers(2, 1), barriers(2, 2)
    rings, turns = (queries, keys, values), barriers(2, 1)
    gl.warp_specialize(
        [
            (_compute, (out_ptr, rings, turns, num_images, num_patches, gl.constexpr(0), SHAPE)),
            (_compute, (out_ptr, rings, turns, num_images, num_patches, gl.constexpr(1), SHAPE)),
            (_load_tiles, ((wide_tiles, rest_tiles), rings, num_images, num_patches, SHAPE)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers of their threads; the first has as many as the second
    )


def attend(qkv: torch.Tensor) -> torch.Tensor:
    """Compute `patch_attention` (see vision/tower.py) of a contiguous 16-bit tensor with heads of 72 or 80 columns."""
    num_images, num_patches, _, heads, head_dim = qkv.shape
    out = torch.empty(num_images, num_patches, heads * head_dim, device=qkv.device, dtype=qkv.dtype)
    tiles = (tiles_of(qkv.flatten(2, 3), 1, TILE.value, 1, columns.value) for columns in (WIDE, REST))
    shape = Shape(heads, head_dim, head_dim**-0.5 * LOG2_E.value)
    num_tiles = num_images * heads * -(-num_patches // TILE.value)
    grid = (min(num_sms(qkv.device), num_tiles),)
    launch(_patch_attention_kernel, grid, qkv.device)(*tiles, out, num_images, num_patches, SHAPE=shape, num_warps=4)
    return out

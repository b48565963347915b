"""y = x W^T + b for a single row of x, where W is 8-bit values times scales of blocks; as gemv.py for other weights.

8-bit weights arrive twice as fast, and have to be converted: the instructions are a bound, too. So the norm before the
product, which every program would compute again, is not fused as it is in gemv.py.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.tiles import Tiles, Weight, as_loadable, columns_of_parts, shape_of

TILE_SIZE = 4096  # weights of a tile, or pairs of them if gated
NUM_TILES = 2  # of a program, which loads both before it waits; with more, the compiler loads the others too late
MAX_TILE_K = 8192  # inputs of a tile; twice as many if that is as full; products that may not be split have more
MIN_FILL = 0.75  # of a tile that inputs should fill; its width is a power of two, and their number need not be
K_MULTIPLE = 128  # inputs of a split: loads are aligned, and no border of blocks cuts what a thread loads at once
SHORT = 2**24  # products with at most so many weights are short


@triton.jit
def _load_tile(w_ptrs, first_n, k, is_column, N, SHAPE: tl.constexpr, ROWS: tl.constexpr, MATRICES: tl.constexpr):
    """The weights of ROWS rows from first_n on [ROWS, MATRICES, parts, lane], 0 where not is_column, and what their
    products are multiplied by and what is added [ROWS, MATRICES]: 1 and 0 without scales of rows and without a bias.

    k and is_column are [parts, lane].
    """
    w_ptr, scale_ptr, bias_ptr = w_ptrs
    n = tl.minimum(first_n + tl.arange(0, ROWS), N - 1)  # a mask would take registers, and time
    row = n[:, None] + tl.arange(0, MATRICES)[None, :] * N
    w = w_ptr + row.to(tl.int64)[:, :, None, None] * SHAPE.k + k[None, None]
    # weights are read once, and should not displace x in the cache
    tile = tl.load(w, is_column[None, None], 0.0, eviction_policy="evict_first")
    factors = tl.load(scale_ptr + row // SHAPE.block_n) if SHAPE.block_k == SHAPE.k else 1.0
    bias = tl.load(bias_ptr + row).to(tl.float32) if bias_ptr is not None else 0.0
    return tile, factors, bias


@dependent_kernel(early=("w_ptrs",))
@triton.jit
def _scaled_gemv_kernel(
    x_ptr, w_ptrs, out_ptr, N, SHAPE: tl.constexpr, TILES: tl.constexpr, MATRICES: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    COLUMNS: tl.constexpr = SHAPE.k // SHAPE.block_k
    NUM_TILES: tl.constexpr = TILES.stages
    first_n = tl.program_id(0) * (TILES.tile_n * NUM_TILES)
    split = tl.program_id(1)
    # 8 weights that a thread loads at once, or 16: measured
    part_k = columns_of_parts(TILES.tile_k, SHAPE.block_k, 8 * MATRICES)
    k = split * SHAPE.k_per_split + part_k
    is_column = part_k < SHAPE.k_per_split
    if SHAPE.split_k * SHAPE.k_per_split > SHAPE.k:
        is_column = is_column & (k < SHAPE.k)
    # load the first tiles of W while the kernel before still runs
    tile, factors, bias = _load_tile(w_ptrs, first_n, k, is_column, N, SHAPE, TILES.tile_n, MATRICES)
    if NUM_TILES == 2:
        next_n = first_n + TILES.tile_n
        next_tile, next_factors, next_bias = _load_tile(w_ptrs, next_n, k, is_column, N, SHAPE, TILES.tile_n, MATRICES)
    if COLUMNS > 1:  # all rows of the program are in the same row of blocks
        block_row = (first_n + tl.arange(0, MATRICES) * N) // SHAPE.block_n
        column = split * SHAPE.k_per_split + tl.arange(0, k.shape[0]) * k.shape[1]
        scales_at = w_ptrs[1] + block_row[:, None] * COLUMNS + (column // SHAPE.block_k)[None, :]
        scales = tl.load(scales_at, (column < SHAPE.k)[None, :], 0.0)[None]
    else:
        scales = tl.full([1, 1, k.shape[0]], 1.0, tl.float32)
    gdc_wait(PDL)
    x = tl.load(x_ptr + k, is_column, 0.0).to(tl.float32)[None, None]
    for i in tl.static_range(NUM_TILES):
        y = tl.sum(tl.sum(decode_e4m3(tile, tl.float32) * x, 3) * scales, 2) * factors + bias  # [tile_n, MATRICES]
        n = first_n + i * TILES.tile_n + tl.arange(0, TILES.tile_n)
        if MATRICES == 2:
            gate, up = tl.split(y)
            y = gate / (1.0 + tl.exp(-gate)) * up
        else:
            y = tl.reshape(y, n.shape)
        tl.store(out_ptr + split * N + n, y.to(out_ptr.dtype.element_ty), n < N)
        if i + 1 < NUM_TILES:
            tile, factors, bias = next_tile, next_factors, next_bias


def choose_gemv_split_k(k: int, max_split_k: int) -> int:
    """The best number of partial sums, at most `max_split_k`, for `scaled_gemv` of a product with K inputs."""

    def fill(split_k: int) -> float:
        k_per_split = _k_per_split(k, split_k)
        return k_per_split / triton.next_power_of_2(k_per_split)

    if k <= MAX_TILE_K:
        return 1
    min_split_k = min(max_split_k, triton.cdiv(k, MAX_TILE_K)) if k > 2 * MAX_TILE_K else 1
    # of splits that are as good, max returns the first
    return max(range(min_split_k, max_split_k + 1), key=lambda split_k: min(fill(split_k), MIN_FILL))


def _k_per_split(k: int, split_k: int) -> int:
    """The number of inputs of a split."""
    return k if split_k == 1 else triton.cdiv(k, K_MULTIPLE * split_k) * K_MULTIPLE


def scaled_gemv(
    x: torch.Tensor, weight: Weight, gated: bool = False, bias=None, split_k: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [1, K] times W transposed + bias [N] -> [1, N]; `weight` is values [N, K] and scales [N / rows, K / columns].

    If `gated`, W is [2N, K], bias [2N], and the result is silu of the first half of the outputs times the second half;
    a border of blocks lies between them. Blocks that divide K have powers of two as sizes. All contiguous.

    With split_k > 1, neither gated nor with a bias, the result is [split_k, 1, N], whose sum is the product. `out`
    [split_k, 1, N] takes the result.
    """
    assert split_k == 1 or (not gated and bias is None)
    matrices, (values, scales) = 2 if gated else 1, weight
    n, k = values.shape[0] // matrices, values.shape[1]
    out = torch.empty((split_k, 1, n), dtype=x.dtype, device=x.device) if out is None else out
    shape = shape_of(values, scales)._replace(split_k=split_k, k_per_split=_k_per_split(k, split_k))
    tile_k, num_tiles = triton.next_power_of_2(shape.k_per_split), NUM_TILES
    tile_n = max(1, TILE_SIZE // tile_k)
    if shape.block_k < k:  # all rows of a program are in the same row of blocks
        tile_n = min(tile_n, shape.block_n)
        num_tiles = min(num_tiles, shape.block_n // tile_n)
    tiles = Tiles(tile_n, tile_k, num_tiles, min(16, max(1, tile_n * tile_k // 2048)))
    # as for gemv: short products gain from overlapping kernels
    shared = 50 if values.numel() <= SHORT else None
    pointers, constants = (as_loadable(values), scales, bias), dict(SHAPE=shape, TILES=tiles, MATRICES=matrices)
    launch(_scaled_gemv_kernel, (triton.cdiv(n, tile_n * num_tiles), split_k), x.device, shared)(
        x, pointers, out, n, **constants, num_warps=tiles.warps
    )
    return out if split_k > 1 else out[0]

"""Computes y = x W^T + b, where x is a single row, and W has 8 bits and block scales.

The number of instructions matters, because 8-bit weights arrive twice as fast as the 16-bit weights in gemv.py, and
must be converted. The preceding norm is not fused, because every program would spend instructions on the same norm.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import Activation
from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.tiles import Tiles, Weight, as_loadable, columns_of_parts, shape_of

TILE_SIZE = 4096  # weights per tile; with an activation, pairs of weights
NUM_TILES = 2  # per program, which loads both before it waits; the compiler would load more tiles too late
MAX_TILE_K = 8192  # inputs per tile; up to twice as many if a split fills tiles no better; more if no split is allowed
MIN_FILL = 0.75  # the fraction of a tile's width, a power of two, that inputs should fill
K_MULTIPLE = 128  # divides the inputs per split, so that loads are aligned, and no load crosses a block's border
SHORT = 2**24  # a matmul with at most this many weights is short


@triton.jit
def _load_tile(w_ptrs, first_n, k, is_column, N, SHAPE: tl.constexpr, ROWS: tl.constexpr, MATRICES: tl.constexpr):
    """Return a tile with ROWS rows of weights.

    Also return the factors and the biases of the results, which are [ROWS, MATRICES]. The tile begins at row `first_n`,
    and is [ROWS, MATRICES, parts, lane], with zeros where `is_column` is False. If there are no scales, the factors are
    1. If there is no bias, the biases are 0. `k` and `is_column` are [parts, lane].
    """
    w_ptr, scale_ptr, bias_ptr = w_ptrs
    n = tl.minimum(first_n + tl.arange(0, ROWS), N - 1)  # instead of a mask, which would cost registers and time
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
    x_ptr, w_ptrs, out_ptr, N, SHAPE: tl.constexpr, TILES: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    # A program computes NUM_TILES tiles of outputs over the inputs of one split.
    gdc_launch_dependents(PDL)
    COLUMNS: tl.constexpr = SHAPE.k // SHAPE.block_k
    NUM_TILES: tl.constexpr = TILES.stages
    MATRICES: tl.constexpr = 1 if ACT is None else 2
    first_n = tl.program_id(0) * (TILES.tile_n * NUM_TILES)
    split = tl.program_id(1)
    # a thread loads 8 weights at once, or 16 with an activation, which was measured to be fastest
    part_k = columns_of_parts(TILES.tile_k, SHAPE.block_k, 8 * MATRICES)
    k = split * SHAPE.k_per_split + part_k
    is_column = part_k < SHAPE.k_per_split
    if SHAPE.split_k * SHAPE.k_per_split > SHAPE.k:
        is_column = is_column & (k < SHAPE.k)
    # load the first tiles of W while the previous kernel still runs
    tile, factors, bias = _load_tile(w_ptrs, first_n, k, is_column, N, SHAPE, TILES.tile_n, MATRICES)
    if NUM_TILES == 2:
        next_n = first_n + TILES.tile_n
        next_tile, next_factors, next_bias = _load_tile(w_ptrs, next_n, k, is_column, N, SHAPE, TILES.tile_n, MATRICES)
    if COLUMNS > 1:  # all rows of a program are in the same row of blocks
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
            y = activate(gate, up, ACT)
        else:
            y = tl.reshape(y, n.shape)
        tl.store(out_ptr + split * N + n, y.to(out_ptr.dtype.element_ty), n < N)
        if i + 1 < NUM_TILES:
            tile, factors, bias = next_tile, next_factors, next_bias


def choose_gemv_split_k(k: int, max_split_k: int) -> int:
    """Return the best `split_k` for `scaled_gemv` with `k` inputs. The maximum is `max_split_k`."""

    def fill(split_k: int) -> float:
        k_per_split = _k_per_split(k, split_k)
        return k_per_split / triton.next_power_of_2(k_per_split)

    if k <= MAX_TILE_K:
        return 1
    min_split_k = min(max_split_k, triton.cdiv(k, MAX_TILE_K)) if k > 2 * MAX_TILE_K else 1
    # max returns the smallest of equally good splits
    return max(range(min_split_k, max_split_k + 1), key=lambda split_k: min(fill(split_k), MIN_FILL))


def _k_per_split(k: int, split_k: int) -> int:
    return k if split_k == 1 else triton.cdiv(k, K_MULTIPLE * split_k) * K_MULTIPLE


def scaled_gemv(
    x: torch.Tensor,
    weight: Weight,
    act: Activation | None = None,
    bias=None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, which is [1, N]. x is [1, K], and bias is [N].

    `weight` is (values [N, K], scales [N / block rows, K / block columns]), and all tensors are contiguous. If blocks
    are narrower than K, both sides of a block must be powers of two.

    If `act` is given, W is [2 * N, K], bias is [2 * N], and the result is the gated activation of all outputs. No block
    may contain rows of both halves of W. If `split_k` > 1, return partial sums [split_k, 1, N] of x W^T, without
    applying `act` and `bias`. `out` [split_k, 1, N] receives the result.
    """
    assert split_k == 1 or (act is None and bias is None)
    matrices, (values, scales) = 2 if act else 1, weight
    n, k = values.shape[0] // matrices, values.shape[1]
    out = torch.empty((split_k, 1, n), dtype=x.dtype, device=x.device) if out is None else out
    shape = shape_of(values, scales)._replace(split_k=split_k, k_per_split=_k_per_split(k, split_k))
    tile_k, num_tiles = triton.next_power_of_2(shape.k_per_split), NUM_TILES
    tile_n = max(1, TILE_SIZE // tile_k)
    if shape.block_k < k:  # all rows of a program are in the same row of blocks
        tile_n = min(tile_n, shape.block_n)
        num_tiles = min(num_tiles, shape.block_n // tile_n)
    tiles = Tiles(tile_n, tile_k, num_tiles, min(16, max(1, tile_n * tile_k // 2048)))
    # as in gemv: short matmuls gain from overlapping kernels
    shared = 50 if values.numel() <= SHORT else None
    pointers, constants = (as_loadable(values), scales, bias), dict(SHAPE=shape, TILES=tiles, ACT=act)
    launch(_scaled_gemv_kernel, (triton.cdiv(n, tile_n * num_tiles), split_k), x.device, shared)(
        x, pointers, out, n, **constants, num_warps=tiles.warps
    )
    return out if split_k > 1 else out[0]

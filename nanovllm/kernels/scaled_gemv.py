"""y = x W^T + b for a single row of x, where W is 8-bit values times scales of blocks; as gemv.py for other weights.

8-bit weights arrive twice as fast, and have to be converted: the instructions are a bound, too. So the norm before the
product, which every program would compute again, is not fused as it is in gemv.py.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.scaled_tiles import (
    as_loadable,
    block_shape,
    columns_of_parts,
    load_parts,
    load_parts_of_x,
    multiply_parts,
    scales_of_parts,
)

NUM_WEIGHTS = 16384  # of a program; with more of them in flight, fewer programs would fit on a multiprocessor
NUM_WEIGHTS_OF_SMALL = 8192  # for small matrices, to get more programs
SMALL = 2**23  # weights of a matrix
MAX_TILE_K = 4096


@dependent_kernel(early=("w_ptr", "scale_ptr", "bias_ptr"))
@triton.jit
def _scaled_gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    COLUMNS: tl.constexpr = K // BLOCK_K
    first_n = tl.program_id(0) * TILE_N
    n = first_n + tl.arange(0, TILE_N)
    is_row = n < N
    k = columns_of_parts(TILE_K, BLOCK_K)
    w = w_ptr + n[:, None, None].to(tl.int64) * K + k[None]
    up = w + N * K
    # all rows of the tile are in the same row of blocks, or there is one column of blocks, whose scales come last
    scales_at = scale_ptr + first_n // BLOCK_N * COLUMNS
    up_scales_at = scale_ptr + (N + first_n) // BLOCK_N * COLUMNS
    # load the first tiles of W while the kernel before still runs
    tile = load_parts(w, k, is_row, K, TILE_K)
    scales = scales_of_parts(scales_at, 0, k, K, BLOCK_K)
    if GATED:
        up_tile = load_parts(up, k, is_row, K, TILE_K)
        up_scales = scales_of_parts(up_scales_at, 0, k, K, BLOCK_K)
    if COLUMNS == 1:
        row_scales = tl.load(scale_ptr + n // BLOCK_N, is_row, 0.0)
        if GATED:
            up_row_scales = tl.load(scale_ptr + (N + n) // BLOCK_N, is_row, 0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, is_row, 0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, is_row, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = tl.zeros([TILE_N, k.shape[0]], tl.float32)
    up_acc = tl.zeros([TILE_N, k.shape[0]], tl.float32)
    for begin in tl.static_range(0, K, TILE_K):  # unrolled: the loads of several tiles are in flight
        x = load_parts_of_x(x_ptr, begin + k, K, TILE_K)
        if begin > 0:
            tile = load_parts(w + begin, begin + k, is_row, K, TILE_K)
            scales = scales_of_parts(scales_at, begin, k, K, BLOCK_K)
            if GATED:
                up_tile = load_parts(up + begin, begin + k, is_row, K, TILE_K)
                up_scales = scales_of_parts(up_scales_at, begin, k, K, BLOCK_K)
        acc += multiply_parts(tile, x, scales)
        if GATED:
            up_acc += multiply_parts(up_tile, x, up_scales)
    y = tl.sum(acc, 1)
    if COLUMNS == 1:
        y *= row_scales
    if HAS_BIAS:
        y += bias
    if GATED:
        up_y = tl.sum(up_acc, 1)
        if COLUMNS == 1:
            up_y *= up_row_scales
        if HAS_BIAS:
            up_y += up_bias
        y = y / (1.0 + tl.exp(-y)) * up_y
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), is_row)


def scaled_gemv(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [1, K] times W transposed + bias [N] -> [1, N], with W = values [N, K] times scales [N / rows, K / columns].

    If `gated`, W is [2N, K], bias [2N], and the result is silu of the first half of the outputs times the second half;
    a border of blocks lies between them. Blocks that divide K have powers of two as sizes. All contiguous. `out` takes
    the result.
    """
    n, k = values.shape[0] // (2 if gated else 1), values.shape[1]
    block_n, block_k = block_shape(values, scales)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    num_weights = (NUM_WEIGHTS_OF_SMALL if values.numel() <= SMALL else NUM_WEIGHTS) // (2 if gated else 1)
    padded_k = triton.next_power_of_2(k)
    tile_n = max(1, num_weights // padded_k)
    if block_k < k:
        tile_n = min(tile_n, block_n)
    # as for gemv: short products gain from overlapping kernels
    is_short = values.numel() <= 2**24
    launch(_scaled_gemv_kernel, (triton.cdiv(n, tile_n),), x.device, shared=50 if is_short else None)(
        x,
        as_loadable(values),
        scales,
        bias,
        out,
        n,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TILE_N=tile_n,
        TILE_K=min(MAX_TILE_K // (2 if is_short else 1), padded_k),
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=4,
    )
    return out

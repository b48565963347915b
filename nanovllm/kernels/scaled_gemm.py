"""y = x W^T for several rows of x, where W is 8-bit values times scales of blocks; also split along K, for few rows.

x may be quantized too, to e4m3, for GPUs with FP8 units. Otherwise W is converted to the dtype of x.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    has_tma,
    launch,
    num_sms,
)
from nanovllm.kernels.tiles import (
    QuantizedRows,
    Tiles,
    as_loadable,
    block_shape,
    dot_values,
    group_size,
    load_tile,
    tensors_of,
    times_scales,
)

TILE_K = 128
# by TILE_M; two programs or more fit on a multiprocessor
TILES = {
    16: Tiles(64, TILE_K, 6, 4),
    32: Tiles(64, TILE_K, 6, 4),
    64: Tiles(64, TILE_K, 4, 4),
    128: Tiles(64, TILE_K, 4, 4),
}


@dependent_kernel()
@triton.jit(do_not_specialize=["M"])
def _scaled_gemm_kernel(
    x_ptr,
    x_tiles,
    x_scale_ptr,
    w_ptr,
    w_tiles,
    scale_ptr,
    out_ptr,
    M,
    N,
    x_scale_stride,
    K: tl.constexpr,
    K_PER_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_m = tl.program_id(0) * TILE_M
    first_n = tl.program_id(1) * TILE_N
    split = tl.program_id(2)
    m = first_m + tl.arange(0, TILE_M)
    n = first_n + tl.arange(0, TILE_N)
    x_scales = x_scale_ptr, m, m < M, x_scale_stride
    w_scales = scale_ptr, first_n, N
    # transposed, as in split_k_gemm.py
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    first_k = split * K_PER_SPLIT
    for begin in tl.range(first_k, tl.minimum(first_k + K_PER_SPLIT, K), TILE_K, num_stages=STAGES):
        w = load_tile(w_tiles, w_ptr, first_n, begin, n < N, K, TILE_N, TILE_K, TMA)
        x = load_tile(x_tiles, x_ptr, first_m, begin, m < M, K, TILE_M, TILE_K, TMA)
        product = dot_values(w, x.T, PRECISION)
        acc += times_scales(product, x_scales, w_scales, begin, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, False)
    acc = times_scales(acc, x_scales, w_scales, 0, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, True)
    out = out_ptr + (split * M + m[:, None]) * N + n[None, :]
    tl.store(out, acc.T.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def choose_scaled_split_k(num_rows: int, num_outputs: int, device: torch.device, max_split_k: int) -> int:
    """The best number of partial sums, at most `max_split_k`, for `scaled_gemm` of a product."""
    tile_m = _tile_m(num_rows)
    num_tiles = triton.cdiv(num_outputs, TILES[tile_m].tile_n) * triton.cdiv(num_rows, tile_m)
    return max(1, min(max_split_k, 2 * num_sms(device) // num_tiles))


def _tile_m(num_rows: int) -> int:
    return min(128, max(16, triton.next_power_of_2(num_rows)))


def scaled_gemm(
    x: torch.Tensor | QuantizedRows,
    values: torch.Tensor,
    scales: torch.Tensor,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times W transposed, split along K: [split_k, M, N], whose sum is the product.

    W is values [N, K] times scales [N / block rows, K / block columns], of at least 32 columns. All contiguous. `out`
    takes the result.
    """
    (m, n), k = (len(x), len(values)), values.shape[1]
    block_n, block_k = block_shape(values, scales)
    rows, x_scales, x_scale_stride = tensors_of(x)
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=values.device) if out is None else out
    values = as_loadable(values)
    tile_m = _tile_m(m)
    tile_n, tile_k, stages, num_warps = TILES[tile_m]
    tile_k = tile_k if block_k == k else min(tile_k, block_k & -block_k)
    use_tma = has_tma(values.device) and k % 16 == 0 and x.dtype != torch.float32
    grid = triton.cdiv(m, tile_m), triton.cdiv(n, tile_n), split_k
    launch(_scaled_gemm_kernel, grid, values.device, shared=50 if tile_m == 16 else 100)(
        rows,
        TensorDescriptor.from_tensor(rows, [tile_m, tile_k]) if use_tma else None,
        x_scales,
        values,
        TensorDescriptor.from_tensor(values, [tile_n, tile_k]) if use_tma else None,
        scales,
        out,
        m,
        n,
        x_scale_stride,
        K=k,
        K_PER_SPLIT=triton.cdiv(triton.cdiv(k, split_k), tile_k) * tile_k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        X_GROUP=group_size(x, k),
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGES=stages if use_tma else min(3, stages),
        TMA=use_tma,
        num_warps=num_warps,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )
    return out

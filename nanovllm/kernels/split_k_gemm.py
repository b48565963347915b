"""y = x W^T for small batches, split along K if there are too few output tiles to fill the GPU."""

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
    add_product,
    as_loadable,
    block_shape,
    group_size,
    load_tile,
    tensors_of,
    times_scales,
)

FEW_WEIGHTS = 5 * 2**20
MAX_ROWS = 256  # with few weights; half of it with more
TILE_N = 64
TILE_K = 128


@dependent_kernel()
@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def _split_k_kernel(
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
    X_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SCALED: tl.constexpr,
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
    # transposed: tensor cores multiply 64 rows at a time, and W has many rows where x has few
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    first_k = split * K_PER_SPLIT
    for begin in tl.range(first_k, tl.minimum(first_k + K_PER_SPLIT, K), TILE_K, num_stages=STAGES):
        w = load_tile(w_tiles, w_ptr, first_n, begin, n < N, K, TILE_N, TILE_K, TMA)
        x = load_tile(x_tiles, x_ptr, first_m, begin, m < M, K, TILE_M, TILE_K, TMA).T
        acc = add_product(
            acc, w, x, x_scales, w_scales, begin, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, PRECISION, IS_SCALED
        )
    if IS_SCALED:
        acc = times_scales(acc, x_scales, w_scales, 0, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, True)
    out = out_ptr + (split * M + m[:, None]) * N + n[None, :]
    tl.store(out, acc.T.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def split_k_product(
    x: torch.Tensor | QuantizedRows,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    tile_m: int,
    tiles: Tiles,
    split_k: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`split_k_gemm` or, with scales, `scaled_gemm`, by these tiles."""
    (m, (n, k)), is_scaled, (block_n, block_k) = (len(x), values.shape), scales is not None, block_shape(values, scales)
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=values.device) if out is None else out
    (rows, x_scales, x_scale_stride), values = tensors_of(x), as_loadable(values)
    tile_k = tiles.tile_k if block_k == k else min(tiles.tile_k, block_k & -block_k)  # a tile lies in one block
    use_tma = not is_scaled or (has_tma(values.device) and k % 16 == 0 and x.dtype != torch.float32)
    # the smallest tiles leave half of the memory as cache, like the kernels around them: see dependent_launch.py
    grid = triton.cdiv(m, tile_m), triton.cdiv(n, tiles.tile_n), split_k
    launch(_split_k_kernel, grid, values.device, shared=50 if tile_m == 16 else 100)(
        rows,
        TensorDescriptor.from_tensor(rows, [tile_m, tile_k]) if use_tma else None,
        x_scales,
        values,
        TensorDescriptor.from_tensor(values, [tiles.tile_n, tile_k]) if use_tma else None,
        scales,
        out,
        m,
        n,
        x_scale_stride,
        K=k,
        K_PER_SPLIT=triton.cdiv(triton.cdiv(k, split_k), tile_k) * tile_k,
        X_GROUP=group_size(x, k),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TILE_M=tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tile_k,
        STAGES=tiles.stages if use_tma else min(3, tiles.stages),
        IS_SCALED=is_scaled,
        TMA=use_tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )
    return out


def _tile_m(m: int, weight: torch.Tensor) -> int:
    few = weight.numel() <= FEW_WEIGHTS
    if m <= 64:
        return max(16 if few else 32, triton.next_power_of_2(m))
    return 64 if few and m < MAX_ROWS else 128


def choose_split_k(x: torch.Tensor, weight: torch.Tensor, max_split_k: int) -> int:
    """The best split_k, up to `max_split_k`, for `split_k_gemm` of this product; 0 where the library is faster."""
    (m, k), n = x.shape, weight.shape[0]
    if not has_tma(x.device) or x.dtype == torch.float32 or not 0 < m <= MAX_ROWS or k % 8:
        return 0
    few = weight.numel() <= FEW_WEIGHTS
    tile_m = _tile_m(m, weight)
    num_tiles, sms = triton.cdiv(n, TILE_N) * triton.cdiv(m, tile_m), num_sms(x.device)
    split_k = min(max_split_k, sms // num_tiles)
    # TMA is slow with tiles that exceed x, and the library is fast if its tiles fill half to two thirds of the GPU
    tiles_are_full = m <= 64 or m % tile_m == 0 or (few and max_split_k > 1)
    is_faster = few or (m <= MAX_ROWS // 2 and not sms < 2 * split_k * num_tiles < 1.4 * sms)
    return split_k if tiles_are_full and is_faster else 0


def split_k_gemm(
    x: torch.Tensor, weight: torch.Tensor, split_k: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, split along K: [split_k, M, N], whose sum is the product.

    All contiguous, rows of a multiple of 16 bytes. `out` takes the result.
    """
    tile_m = _tile_m(len(x), weight)
    tiles = Tiles(TILE_N, TILE_K, 6 if tile_m in (32, 64) else 4, 4)
    return split_k_product(x, weight, None, tile_m, tiles, split_k, out)

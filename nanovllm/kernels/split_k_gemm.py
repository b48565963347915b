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

FEW_WEIGHTS = 5 * 2**20
MAX_ROWS = 256  # with few weights; half of it with more
TILE_N = 64
TILE_K = 128


@dependent_kernel()
@triton.jit(do_not_specialize=["M"])
def _split_k_gemm_kernel(
    x_tiles,
    w_tiles,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    K_PER_SPLIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_m = tl.program_id(0) * TILE_M
    first_n = tl.program_id(1) * TILE_N
    split = tl.program_id(2)
    # transposed: tensor cores multiply 64 rows at a time, and W has many rows where x has few
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    first_k = split * K_PER_SPLIT
    for begin in tl.range(first_k, tl.minimum(first_k + K_PER_SPLIT, K), TILE_K, num_stages=STAGES):
        w = w_tiles.load([first_n, begin])
        acc = tl.dot(w, x_tiles.load([first_m, begin]).T, acc, input_precision=PRECISION)
    m = first_m + tl.arange(0, TILE_M)[:, None]
    n = first_n + tl.arange(0, TILE_N)[None, :]
    tl.store(out_ptr + (split * M + m) * N + n, acc.T.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


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
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=x.device) if out is None else out
    tile_m = _tile_m(m, weight)
    k_per_split = triton.cdiv(triton.cdiv(k, split_k), TILE_K) * TILE_K
    grid = triton.cdiv(m, tile_m), triton.cdiv(n, TILE_N), split_k
    # the smallest tiles leave half of the memory as cache, like the kernels around them: see dependent_launch.py
    launch(_split_k_gemm_kernel, grid, x.device, shared=50 if tile_m == 16 else 100)(
        TensorDescriptor.from_tensor(x, [tile_m, TILE_K]),
        TensorDescriptor.from_tensor(weight, [TILE_N, TILE_K]),
        out,
        m,
        n,
        K=k,
        K_PER_SPLIT=k_per_split,
        TILE_M=tile_m,
        TILE_N=TILE_N,
        TILE_K=TILE_K,
        STAGES=6 if tile_m in (32, 64) else 4,
        num_warps=4,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )
    return out

"""y = x W^T for up to some hundred rows, where W has so few tiles that all can be worked on at once."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_tma, launch, num_sms

FEW_WEIGHTS = 5 * 2**20
MAX_ROWS = 256  # of a product with few weights, half of it with more
TILE_N = 64
TILE_K = 128


@triton.jit(do_not_specialize=["M"])
def _split_k_gemm_kernel(
    x_tiles,
    w_tiles,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    PER_PART: tl.constexpr,
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
    part = tl.program_id(2)
    acc = tl.zeros(
        [TILE_N, TILE_M], tl.float32
    )  # transposed: the tensor cores take 64 rows at a time, of which W has many
    for begin in tl.range(part * PER_PART, tl.minimum(part * PER_PART + PER_PART, K), TILE_K, num_stages=STAGES):
        w = w_tiles.load([first_n, begin])
        acc = tl.dot(w, x_tiles.load([first_m, begin]).T, acc, input_precision=PRECISION)
    m = first_m + tl.arange(0, TILE_M)[:, None]
    n = first_n + tl.arange(0, TILE_N)[None, :]
    tl.store(out_ptr + (part * M + m) * N + n, acc.T.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


def _tile_m(m: int, weight: torch.Tensor) -> int:
    few = weight.numel() <= FEW_WEIGHTS
    if m <= 64:
        return max(16 if few else 32, triton.next_power_of_2(m))
    return 64 if few and m < MAX_ROWS else 128


def choose_split_k(x: torch.Tensor, weight: torch.Tensor, most: int) -> int:
    """In how many parts, of `most`, `split_k_gemm` had best cut this product; 0 where the library is faster."""
    (m, k), n = x.shape, weight.shape[0]
    if not has_tma(x.device) or x.dtype == torch.float32 or not 0 < m <= MAX_ROWS or k % 8:
        return 0
    few = weight.numel() <= FEW_WEIGHTS
    tile_m = _tile_m(m, weight)
    tiles, processors = triton.cdiv(n, TILE_N) * triton.cdiv(m, tile_m), num_sms(x.device)
    parts = min(most, processors // tiles)
    # TMA is slow with rows that are not there, and the library good at half to two thirds of the multiprocessors
    filled = m <= 64 or m % tile_m == 0 or (few and most > 1)
    suits = filled and (few or (m <= MAX_ROWS // 2 and not processors < 2 * parts * tiles < 1.4 * processors))
    return parts if suits else 0


def split_k_gemm(
    x: torch.Tensor, weight: torch.Tensor, parts: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, cut in `parts` along K: [parts, M, N], whose sum is the product.

    All contiguous, rows of a multiple of 16 bytes. `out` takes the result.
    """
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((parts, m, n), dtype=x.dtype, device=x.device) if out is None else out
    tile_m = _tile_m(m, weight)
    per_part = triton.cdiv(triton.cdiv(k, parts), TILE_K) * TILE_K
    grid = triton.cdiv(m, tile_m), triton.cdiv(n, TILE_N), parts
    # the fewest rows leave half of the memory as cache, as the kernels around them do: see dependent_launch.py
    launch(_split_k_gemm_kernel, grid, x.device, shared=50 if tile_m == 16 else 100)(
        TensorDescriptor.from_tensor(x, [tile_m, TILE_K]),
        TensorDescriptor.from_tensor(weight, [TILE_N, TILE_K]),
        out,
        m,
        n,
        K=k,
        PER_PART=per_part,
        TILE_M=tile_m,
        TILE_N=TILE_N,
        TILE_K=TILE_K,
        STAGES=6 if tile_m in (32, 64) else 4,
        num_warps=4,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )
    return out

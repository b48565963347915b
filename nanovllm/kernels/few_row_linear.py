"""y = x W^T for up to some hundred rows and a weight so small that launching and starting up is most of the product."""
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_tma, launch

MOST_ROWS = 256
MOST_WEIGHTS = 5 * 2**20  # with more of them the library's kernel is faster
TILE_K = 128


@triton.jit(do_not_specialize=["M"])
def _few_row_linear_kernel(
    x_tiles, w_tiles, out_ptr, M, N, K: tl.constexpr, PER_PART: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_m = tl.program_id(0) * TILE_M
    first_n = tl.program_id(1) * TILE_N
    part = tl.program_id(2)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for begin in tl.range(part * PER_PART, tl.minimum(part * PER_PART + PER_PART, K), TILE_K, num_stages=4):
        x = x_tiles.load([first_m, begin])
        acc = tl.dot(x, w_tiles.load([first_n, begin]).T, acc, input_precision=PRECISION)
    m = first_m + tl.arange(0, TILE_M)[:, None]
    n = first_n + tl.arange(0, TILE_N)[None, :]
    tl.store(out_ptr + (part * M + m) * N + n, acc.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


def suits_few_row_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `few_row_linear` is faster than the library for this product."""
    few = 0 < x.shape[0] <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS and weight.shape[1] % 8 == 0
    return few and x.dtype != torch.float32 and has_tma(x.device)


def few_row_linear(
    x: torch.Tensor, weight: torch.Tensor, parts: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, cut in `parts` along K: [parts, M, N], whose sum is the product.

    All contiguous, rows of a multiple of 16 bytes. `out` takes the result.
    """
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((parts, m, n), dtype=x.dtype, device=x.device) if out is None else out
    tile_m = max(16, min(64, triton.next_power_of_2(m)))
    # the widest tile that still gives most multiprocessors a program
    programs = triton.cdiv(m, tile_m) * parts
    tile_n = next((tile for tile in (128, 64) if programs * triton.cdiv(n, tile) >= 96), 32)
    per_part = triton.cdiv(triton.cdiv(k, parts), TILE_K) * TILE_K
    grid = triton.cdiv(m, tile_m), triton.cdiv(n, tile_n), parts
    launch(_few_row_linear_kernel, grid, x.device, shared=50 if tile_m == 16 else 100)(
        TensorDescriptor.from_tensor(x, [tile_m, TILE_K]), TensorDescriptor.from_tensor(weight, [tile_n, TILE_K]),
        out, m, n, K=k, PER_PART=per_part, TILE_M=tile_m, TILE_N=tile_n, TILE_K=TILE_K, num_warps=4,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out

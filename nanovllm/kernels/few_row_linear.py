"""y = x W^T for up to some hundred rows and a weight so small that launching and starting up is most of the product."""
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, is_hopper, launch_options

MOST_ROWS = 256
MOST_WEIGHTS = 2**23  # with more of them a library's kernel is faster
TILE_K = 128


@triton.jit
def _few_row_linear_kernel(
    x_tiles, w_tiles, out_ptr, M, N, K: tl.constexpr, PER_PART: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    first_m = tl.program_id(0) * TILE_M
    first_n = tl.program_id(1) * TILE_N
    part = tl.program_id(2)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    up = tl.zeros([TILE_M, TILE_N], tl.float32)
    if PDL:
        gdc_wait()
    for begin in tl.range(part * PER_PART, tl.minimum(part * PER_PART + PER_PART, K), TILE_K, num_stages=4):
        x = x_tiles.load([first_m, begin])
        acc = tl.dot(x, w_tiles.load([first_n, begin]).T, acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(x, w_tiles.load([N + first_n, begin]).T, up, input_precision=PRECISION)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    m = first_m + tl.arange(0, TILE_M)[:, None]
    n = first_n + tl.arange(0, TILE_N)[None, :]
    tl.store(out_ptr + (part * M + m) * N + n, acc.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


def suits_few_row_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `few_row_linear` is faster than the library for this product."""
    few = 0 < x.shape[0] <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS and weight.shape[1] % 8 == 0
    return few and x.dtype != torch.float32 and is_hopper(x.device)


def few_row_linear(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, parts: int = 1) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, cut in `parts` along K: [parts, M, N], whose sum is the product.

    Gated, weight is [2N, K], parts is 1, and [1, M, N] is silu of the first half of the outputs times the second.
    All contiguous.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((parts, m, n), dtype=x.dtype, device=x.device)
    tile_m = max(16, min(64, triton.next_power_of_2(m)))
    # the widest tile that still gives most multiprocessors a program
    programs = triton.cdiv(m, tile_m) * parts
    tile_n = next((tile for tile in ((64, 32) if gated else (128, 64, 32)) if programs * triton.cdiv(n, tile) >= 96), 32)
    per_part = triton.cdiv(triton.cdiv(k, parts), TILE_K) * TILE_K
    _few_row_linear_kernel[(triton.cdiv(m, tile_m), triton.cdiv(n, tile_n), parts)](
        TensorDescriptor.from_tensor(x, [tile_m, TILE_K]), TensorDescriptor.from_tensor(weight, [tile_n, TILE_K]),
        out, m, n, K=k, PER_PART=per_part, TILE_M=tile_m, TILE_N=tile_n, TILE_K=TILE_K, GATED=gated, num_warps=4,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **launch_options(x.device),
    )  # fmt: skip
    return out

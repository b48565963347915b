"""Root mean square norm, optionally after the addition of split-K partial sums and of the residual."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch, next_power_of_2


@dependent_kernel(early=("weight_ptr",))
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, eps, N: tl.constexpr, SPLIT_K: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    col = tl.arange(0, next_power_of_2(N))
    row = tl.program_id(0).to(tl.int64)
    at = row * N + col
    weight = tl.load(weight_ptr + col, col < N, 0.0).to(tl.float32)
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, col < N, 0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        # a multiple of N, so that the compiler knows the address to be aligned
        x += tl.load(x_ptr + (part * num_rows + row) * N + col, col < N, 0.0).to(tl.float32)
    if residual_ptr is not None:
        total = (x + tl.load(residual_ptr + at, col < N, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, col < N)
        x = total.to(tl.float32)
    tl.store(out_ptr + at, x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight, col < N)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, split_k: int = 1
) -> torch.Tensor:
    """x [T, N] -> the norm of each row of x (+ residual), [T, N]. `residual` [T, N] becomes x + residual.

    With split_k > 1, x is [split_k, T, N], and its sum over the first dimension takes its place. All contiguous.
    """
    num_rows, n = x.shape[-2:]
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if num_rows:
        launch(_rms_norm_kernel, (num_rows,), x.device)(
            x, residual, weight, out, num_rows, eps, N=n, SPLIT_K=split_k, num_warps=4 if n <= 2048 else 8
        )
    return out

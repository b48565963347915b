"""Root mean square norm, with the residual addition in front of it if there is one."""
import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    col = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * N + col
    x = tl.load(x_ptr + at, col < N, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(residual_ptr + at, col < N, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, col < N)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + col, col < N, 0.0).to(tl.float32)
    tl.store(out_ptr + at, x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight, col < N)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, N] -> the norm of each row of x (+ residual). `residual` [T, N] becomes x + residual. All contiguous."""
    num_rows, n = x.shape
    out = torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(n)
        _rms_norm_kernel[(num_rows,)](
            x, residual, weight, out, eps,
            N=n, BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return out

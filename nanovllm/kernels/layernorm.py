"""Root mean square norm, with the residual addition in front of it if there is one."""
import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, inner, stride_outer, stride_inner, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < num_rows)[:, None] & (col < N)
    x_row = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    flat = row.to(tl.int64)[:, None] * N + col
    x = tl.load(x_ptr + x_row[:, None] + col, mask, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(residual_ptr + flat, mask, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + flat, total, mask)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    weight = tl.load(weight_ptr + col, col < N, 0.0).to(tl.float32)
    tl.store(out_ptr + flat, x * weight, mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, N] or [T, heads, N], its last dimension contiguous -> the norm of each row of x (+ residual), contiguous.

    `residual` [T, N], contiguous, becomes x + residual.
    """
    n = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * inner
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    block = triton.next_power_of_2(n)
    rows = max(1, 1024 // block)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual, weight, out, num_rows, inner, x.stride(0), x.stride(-2), eps,
        N=n, BLOCK_N=block, ROWS=rows, HAS_RESIDUAL=residual is not None, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out

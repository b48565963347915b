"""The activation of SwiGLU in one pass."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch


@dependent_kernel()
@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    gate = tl.load(x_ptr + row * 2 * n + col, mask, 0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * n + n + col, mask, 0.0)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * n + col, silu.to(up.dtype) * up, mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2n], contiguous -> silu(x[:, :n]) * x[:, n:]."""
    num_rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(2048, triton.next_power_of_2(n))
        launch(_silu_and_mul_kernel, (num_rows, triton.cdiv(n, block)), x.device)(x, out, n, BLOCK=block, num_warps=8)
    return out

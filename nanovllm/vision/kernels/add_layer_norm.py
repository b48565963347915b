"""Adds the residual in a block of the vision tower, and computes the layer norm of the sum."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import (
    dependent_kernel,
    gdc_launch_and_wait,
    launch,
    next_power_of_2,
)


@dependent_kernel()
@triton.jit
def _add_layer_norm_kernel(x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, N: tl.constexpr, EPS, PDL: tl.constexpr):
    # A program computes one row. The sum replaces the residual.
    gdc_launch_and_wait(PDL)
    dtype = out_ptr.dtype.element_ty
    i = tl.arange(0, next_power_of_2(N))
    places = tl.program_id(0).to(tl.int64) * N + i
    x = tl.load(x_ptr + places, i < N, 0.0).to(tl.float32)
    total = (x + tl.load(residual_ptr + places, i < N, 0.0).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + places, total, i < N)
    total = total.to(tl.float32)
    centered = tl.where(i < N, total - tl.sum(total, 0) / N, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / N + EPS)
    weight = tl.load(weight_ptr + i, i < N, 0.0).to(tl.float32)
    bias = tl.load(bias_ptr + i, i < N, 0.0).to(tl.float32)
    tl.store(out_ptr + places, (centered * scale * weight + bias).to(dtype), i < N)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x + residual, and the sum x + residual, which overwrites `residual`.

    See vision/tower.py.
    """
    if not (x.is_contiguous() and residual.is_contiguous()):
        return NotImplemented
    out = torch.empty_like(x)
    launch(_add_layer_norm_kernel, (len(x),), x.device)(
        x, residual, weight, bias, out, N=x.shape[-1], EPS=eps, num_warps=4
    )
    return out, residual

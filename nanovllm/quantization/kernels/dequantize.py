"""Converts 8-bit weights to the dtype of the activations. Some GEMMs can't read 8-bit weights."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.linear.tiles import as_loadable, shape_of

BLOCK = 2048


@dependent_kernel()
@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, out_ptr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # A program converts BLOCK inputs of a row.
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * SHAPE.k + col
    is_inside = col < SHAPE.k
    w = decode_e4m3(tl.load(w_ptr + at, is_inside, 0.0), tl.float32)
    scale_at = row // SHAPE.block_n * (SHAPE.k // SHAPE.block_k) + col // SHAPE.block_k
    scale = tl.load(scale_ptr + scale_at, is_inside, 0.0)
    tl.store(out_ptr + at, (w * scale).to(out_ptr.dtype.element_ty), is_inside)


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` [N, K] times `scales` [N / block rows, K / block columns] in `dtype`."""
    n, k = values.shape
    out = torch.empty((n, k), dtype=dtype, device=values.device)
    block = min(BLOCK, triton.next_power_of_2(k))
    launch(_dequantize_kernel, (n, triton.cdiv(k, block)), values.device)(
        as_loadable(values), scales, out, SHAPE=shape_of(values, scales), BLOCK=block, num_warps=4
    )
    return out

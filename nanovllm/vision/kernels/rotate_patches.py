"""Rotates the queries and keys of an image's patches."""

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
def _rotate_kernel(qkv_ptr, cos_ptr, sin_ptr, P, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr):
    # A program rotates all heads of q and k of one patch. An image has P patches.
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    patch = row % P
    head = tl.arange(0, next_power_of_2(HEADS))[:, None]
    i = tl.arange(0, next_power_of_2(HALF))[None, :]
    inside = (head < HEADS) & (i < HALF)
    cos = tl.load(cos_ptr + patch * HALF + i, i < HALF, 0.0)
    sin = tl.load(sin_ptr + patch * HALF + i, i < HALF, 0.0)
    ptr = qkv_ptr + row * (HEADS // 2 * 3 * 2 * HALF) + head * (2 * HALF) + i
    first = tl.load(ptr, inside, 0.0).to(tl.float32)
    second = tl.load(ptr + HALF, inside, 0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(ptr, (first * cos - second * sin).to(dtype), inside)
    tl.store(ptr + HALF, (second * cos + first * sin).to(dtype), inside)


def rotate_patches(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate q and k in qkv [B, P, 3, heads, N] in place, and return qkv. See vision/tower.py."""
    num_images, num_patches, _, num_heads, size = qkv.shape
    if not qkv.is_contiguous():
        return NotImplemented
    launch(_rotate_kernel, (num_images * num_patches,), qkv.device)(
        qkv, cos, sin, num_patches, HEADS=2 * num_heads, HALF=size // 2, num_warps=4
    )
    return qkv

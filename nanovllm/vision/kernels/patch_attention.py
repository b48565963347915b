"""Chooses the kernel for the attention of patches."""

import torch

from nanovllm.kernels.launch.gpu_features import has_hopper_kernels


def patch_attention(qkv: torch.Tensor) -> torch.Tensor:
    """Compute attention with the kernel for Hopper, if the kernel supports the tensor. See vision/tower.py."""
    is_16_bit, head_dim = qkv.dtype != torch.float32, qkv.shape[4]
    if not (qkv.is_cuda and is_16_bit and head_dim in (72, 80) and qkv.is_contiguous() and has_hopper_kernels()):
        return NotImplemented
    from nanovllm.vision.kernels.hopper_patch_attention import attend  # it needs Gluon of Triton 3.6

    return attend(qkv)

"""Computes GELU as the epilogue of a library's matmul."""

import torch


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W^T + bias). See vision/tower.py."""
    if not x.is_cuda:  # only the library for GPUs approximates GELU with tanh
        return NotImplemented
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

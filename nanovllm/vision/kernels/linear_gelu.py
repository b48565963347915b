"""Computes GELU as the epilogue of a library's matmul."""

import torch


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W^T + bias). See vision/tower.py."""
    if not x.is_cuda:  # only the library for GPUs approximates GELU with tanh
        return NotImplemented
    y = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)

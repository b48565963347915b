"""Sigmoid gates, which multiply the output of attention or of a shared expert."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.utils.loader import default_weight_loader, parameter


@operation
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, N] by the sigmoid of `gate`, which is [T, N] or [T, 1].

    The result is computed in float32, and rounded once.
    """
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


@operation
def gate_scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, which is [T, 1]. `x` is [T, inputs], and `weight` is [1, inputs]."""
    return F.linear(x, weight)


class SigmoidGate(nn.Module):
    """Multiplies each row of y by a gate: the sigmoid of x W^T, where x is the layer's input."""

    def __init__(self, input_size: int):
        super().__init__()
        self.weight = parameter((1, input_size), default_weight_loader)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Multiply y [T, N] by gates, which are computed from x [T, input_size]."""
        return sigmoid_gate(y, gate_scores(x, self.weight))

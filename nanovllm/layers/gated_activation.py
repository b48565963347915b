"""Gated activations other than SwiGLU."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.kernels.activations import Activation


@operation
def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map x [T, 2 * n] to gelu(x[:, :n]) * x[:, n:]. GELU is approximated with tanh."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class GeluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(x)


@operation
def gated_activation(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply the gated activation to x [T, 2 * n], which contains the gate and up projections. The result is [T, n]."""
    (gate, up), (alpha, cubic, shift, limit) = x.chunk(2, -1), activation
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * (gate + cubic * gate**3)) * (up + shift)


class GatedActivation(nn.Module):
    def __init__(self, activation: Activation):
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_activation(x, self.activation)

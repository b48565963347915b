"""Fuses a linear layer with the preceding norm, the following activation, and the sum of partial results."""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.kernels.activations import FUSED_ACTIVATIONS, GELU_AND_MUL, SWIGLU, activation_of
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.gated_activation import GeluAndMul
from nanovllm.layers.linear import LinearBase, RowParallelLinear, linear
from nanovllm.utils.partial_sum import PartialSum, max_split_k, sum_over_ranks


@operation
def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `linear`. Return a tensor [T, outputs] or, if `split_k` > 1, summands [split_k, T, outputs].

    `split_k` must come from `best_split_k`, whose plain definition returns 1. `out` [split_k, T, outputs] receives the
    result.
    """
    if out is None:
        return linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out[0]) if bias is None else torch.addmm(bias, x, weight.t(), out=out[0])


@operation
def norm_linear(
    x: NormInput, weight: torch.Tensor, bias: torch.Tensor | None = None, act: nn.Module | None = None
) -> torch.Tensor:
    """Compute the norm `x`, the product with the weight, and the activation, whose result may be quantized."""
    y = linear(x.tensor(), weight, bias)
    return y if act is None else act(y)


@operation
def best_split_k(x: torch.Tensor, weight: torch.Tensor, max_split_k: int) -> int:
    """Return the best `split_k` for `split_linear`, at most `max_split_k`."""
    return 1


class WeightFormat:
    """Defines how a fused form multiplies by a weight.

    This class multiplies in the dtype of the activations. quantization/ contains formats for 8-bit and 4-bit weights.
    """

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        return split_linear(x, layer.weight, bias, split_k, out)

    def norm_linear(self, layer: LinearBase, x: NormInput, act: nn.Module | None) -> Any:
        return norm_linear(x, layer.weight, layer.bias, act)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        return best_split_k(x, layer.weight, max_split_k)

    def factors(self, layer: LinearBase, x: NormInput) -> tuple[Any, torch.Tensor, torch.Tensor | None] | None:
        """Return (rows, weight, scales) for kernels that compute the layer's matmul, or None if only `linear` can.

        If the weight is not in FP8, `scales` is None.
        """
        return (x.tensor(), layer.weight, None) if type(self) is WeightFormat else None


class MultipliesByFormat:
    """Replaces `LinearBase.multiply` in layers with a quantized weight or with adapters."""

    def multiply(self: Any, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self.format.linear(self, x, bias)


FUSED_ACTIVATIONS.update({SiluAndMul.forward: SWIGLU, GeluAndMul.forward: GELU_AND_MUL})  # quantization adds another

UNQUANTIZED = WeightFormat()  # has no state


def set_format(layer: LinearBase) -> None:
    """Set the format of a layer, unless quantization or the layer's class has replaced `multiply`."""
    if type(layer).multiply is LinearBase.multiply:
        layer.format = UNQUANTIZED  # type: ignore[assignment]


def are_known(*layers: nn.Module, output: nn.Module | None = None) -> bool:
    """Return whether all layers have a plain `forward` and a format.

    `output` must also be a RowParallelLinear, because its results are summed over the ranks.
    """
    forwards = [(layer, LinearBase.forward) for layer in layers]
    forwards += [] if output is None else [(output, RowParallelLinear.forward)]
    return all(
        type(layer).forward is forward and "forward" not in vars(layer) and hasattr(layer, "format")
        for layer, forward in forwards
    )


def product(layer: Any, x: NormInput, act: nn.Module | None = None) -> Any:
    """Compute act(x W^T + b) with the weight W and bias b of `layer`. `x` is a deferred norm."""
    if act is None or activation_of(act):
        return layer.format.norm_linear(layer, x, act)
    return act(layer.format.norm_linear(layer, x, None))


def partial_sum(layer: Any, x: Any) -> PartialSum:
    """Return the output of a RowParallelLinear as an unfinished sum over the ranks. The next norm completes the sum.

    A rank may also split the matmul of a small batch along the input dimension K, if this is faster.
    """
    bias = layer.bias if layer.tp.rank == 0 else None  # the sum over ranks must contain the bias once
    num_rows, split_k = len(x), 1
    if layer.bias is None:
        split_k = layer.format.best_split_k(layer, x, max_split_k(layer.tp, num_rows))
    compute = partial(layer.format.linear, layer, x, bias, split_k)
    return sum_over_ranks(layer.tp, compute, num_rows, layer.output_size, x.dtype, split_k)

"""Products of linear layers with the norm before them, the activation after them, and the sum that they are part of."""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.layers.activation import SiluAndMul
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
    """`linear` -> [T, outputs], or with split_k > 1, as `best_split_k` returns it, summands [split_k, T, outputs].

    For this definition it returns 1. `out` [split_k, T, outputs] takes the result.
    """
    if out is None:
        return linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out[0]) if bias is None else torch.addmm(bias, x, weight.t(), out=out[0])


@operation
def norm_linear(
    x: NormInput, weight: torch.Tensor, bias: torch.Tensor | None = None, act: SiluAndMul | None = None
) -> torch.Tensor:
    """`linear` of a norm, and the activation, whose result may have another format."""
    y = linear(x.tensor(), weight, bias)
    return y if act is None else act(y)


@operation
def best_split_k(x: torch.Tensor, weight: torch.Tensor, max_split_k: int) -> int:
    """The best number of summands, at most `max_split_k`, for `split_linear` to split a product along its inputs."""
    return 1


class WeightFormat:
    """How a fused form multiplies a layer's weight: here in the dtype of the activations; quantization/ has others."""

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        """The function `split_linear` with this layer's weight."""
        return split_linear(x, layer.weight, bias, split_k, out)

    def norm_linear(self, layer: LinearBase, x: NormInput, act: SiluAndMul | None) -> Any:
        """The function `norm_linear` with this layer's weight and bias."""
        return norm_linear(x, layer.weight, layer.bias, act)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        """The function `best_split_k` with this layer's weight."""
        return best_split_k(x, layer.weight, max_split_k)

    def factors(self, layer: LinearBase, x: NormInput) -> tuple[Any, torch.Tensor, torch.Tensor | None] | None:
        """What kernels multiply: rows, the weight, and its scales if both are in FP8; None if only `linear` can."""
        return (x.tensor(), layer.weight, None) if type(self) is WeightFormat else None


UNQUANTIZED = WeightFormat()  # has no state


def set_format(layer: LinearBase) -> None:
    """Called by `fuse`: unless quantization has set a format, or the layer multiplies in its own way."""
    if type(layer).multiply is LinearBase.multiply:
        layer.format = UNQUANTIZED  # type: ignore[assignment]


def are_known(*layers: nn.Module, output: nn.Module | None = None) -> bool:
    """Whether forms can multiply by these layers, and by one whose `output` the ranks sum.

    Their `forward` is plain, and their format known.
    """
    forwards = [(layer, LinearBase.forward) for layer in layers]
    forwards += [] if output is None else [(output, RowParallelLinear.forward)]
    return all(type(layer).forward is forward and hasattr(layer, "format") for layer, forward in forwards)


# the forwards of activations that are SwiGLU, which kernels compute with the product before; quantization adds its own
SWIGLU = {SiluAndMul.forward}


def is_swiglu(act: nn.Module) -> bool:
    return getattr(type(act), "forward", None) in SWIGLU  # TorchScript's modules have none


def product(layer: Any, x: NormInput, act: nn.Module | None = None) -> Any:
    """act(x W^T + b) of a linear layer."""
    if act is None or is_swiglu(act):
        return layer.format.norm_linear(layer, x, act)
    return act(layer.format.norm_linear(layer, x, None))


def partial_sum(layer: Any, x: Any) -> PartialSum:
    """The output of a RowParallelLinear, whose parts the next norm adds up: those of the ranks, or of one rank.

    With a small batch, a rank may also split its own product into partial sums (split-K), where that is faster.
    """
    bias = layer.bias if layer.tp.rank == 0 else None  # the sum over ranks must contain it once
    num_rows, split_k = len(x), 1
    if layer.bias is None:
        split_k = layer.format.best_split_k(layer, x, max_split_k(layer.tp, num_rows))
    compute = partial(layer.format.linear, layer, x, bias, split_k)
    return sum_over_ranks(layer.tp, compute, num_rows, layer.output_size, x.dtype, split_k)

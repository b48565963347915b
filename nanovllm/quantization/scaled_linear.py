"""Implements linear layers with 8-bit weights and matmuls in the dtype of the activations (W8A16)."""

from typing import Any

import torch
from torch import nn

from nanovllm.fused.fused_linear import WeightFormat, split_linear
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.layers.linear import LinearBase
from nanovllm.quantization.scaled import QuantScheme, ScaledWeight, dequantize


@operation
def scaled_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: nn.Module | None = None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `split_linear` with the weight `values * scales` (see scaled.py). Then apply the activation."""
    y = split_linear(x, dequantize(values, scales, x.dtype), bias, 1, out)
    return y if act is None else act(y)


@operation
def best_scaled_split_k(
    values: torch.Tensor, scales: torch.Tensor, num_rows: int, max_split_k: int, max_rows: int | None = None
) -> int:
    """Return the best `split_k` for `scaled_linear`. The maximum is `max_split_k`.

    If the rows of activations are not quantized, `max_rows` is None. If there are more than `max_rows` rows, only the
    kernel for quantized rows can split K.
    """
    return 1


class ScaledLinear(WeightFormat):
    """The weight format for 8-bit weights. The kernels of matmuls convert the weights while they read them."""

    max_split_k_rows: int | None = None

    def __init__(self, layer: LinearBase, scheme: QuantScheme):
        shape = tuple(layer.weight.shape)
        self.block = scheme.local_block([layer.shard(*shard_id) for shard_id in layer.shard_ids()], shape[1])
        self.weight = ScaledWeight(shape, scheme, self.block, lambda *shard_id: (layer.shard(*shard_id), ()))
        layer.weight = self.weight.values
        if scheme.scale_name is not None:
            setattr(layer, scheme.scale_name, self.weight.scales)
        self.values, self.scales = self.weight.values.data, self.weight.scales.data

    def move_to_end(self, stack: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Store this weight as the last weight of `stack`, which is (values, scales).

        The weight must not be loaded yet.
        """
        self.values, self.scales = (tensor.data[-1] for tensor in stack)
        self.weight.values.data, self.weight.scales.data = self.values, self.scales

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        return scaled_linear(x, self.values, self.scales, bias, None, split_k, out)

    def norm_linear(self, layer: LinearBase, x: NormInput, act: nn.Module | None) -> Any:
        return scaled_linear(x.tensor(), self.values, self.scales, layer.bias, act)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        return best_scaled_split_k(self.values, self.scales, len(x), max_split_k, self.max_split_k_rows)

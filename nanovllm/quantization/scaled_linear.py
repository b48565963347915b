"""Linear layers with 8-bit weights."""

from typing import Any

import torch

from nanovllm.layers.linear import LinearBase, WeightFormat, linear
from nanovllm.quantization.scaled import ScaledWeight, Scaling, dequantize


class ScaledLinear(WeightFormat):
    """Weights that are read as 8-bit values, and multiplied in the dtype of the activations (W8A16)."""

    def __init__(self, layer: LinearBase, scaling: Scaling):
        shard_ids = [(i,) for i in range(len(layer.outputs))] if hasattr(layer, "outputs") else [()]
        shape = tuple(layer.weight.shape)
        block = scaling.local_block([layer.shard(*shard_id) for shard_id in shard_ids], shape[1])
        weight = ScaledWeight(shape, scaling, block, lambda *shard_id: (layer.shard(*shard_id), ()))
        layer.weight = weight.values
        if scaling.scale_name is not None:
            setattr(layer, scaling.scale_name, weight.scales)
        self.block = block
        self.values, self.scales = weight.values.data, weight.scales.data

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        return linear(x, dequantize(self.values, self.scales, x.dtype), bias, 1, out)

    def choose_split_k(self, layer: LinearBase, x: torch.Tensor, bias, max_split_k: int) -> int:
        return 1

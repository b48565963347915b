"""Linear layers with 8-bit weights, whose products are those of the dtype of the activations (W8A16)."""

from types import ModuleType
from typing import Any

import torch

from nanovllm.kernels import triton_ops
from nanovllm.layers.linear import LinearBase, WeightFormat, linear
from nanovllm.quantization.scaled import MIN_BLOCK_COLUMNS, ScaledWeight, Scaling, dequantize

MAX_GEMM_ROWS = 64  # with more rows, weights are converted once, for a product of the library


class ScaledLinear(WeightFormat):
    """8-bit values that are converted where they are read."""

    max_split_k_rows = MAX_GEMM_ROWS

    def __init__(self, layer: LinearBase, scaling: Scaling):
        shape = tuple(layer.weight.shape)
        self.block = scaling.local_block([layer.shard(*shard_id) for shard_id in layer.shard_ids()], shape[1])
        weight = ScaledWeight(shape, scaling, self.block, lambda *shard_id: (layer.shard(*shard_id), ()))
        layer.weight = weight.values
        if scaling.scale_name is not None:
            setattr(layer, scaling.scale_name, weight.scales)
        self.values, self.scales = weight.values.data, weight.scales.data
        self.suits_gemm = self.block.columns >= MIN_BLOCK_COLUMNS

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        if (ops := triton_ops(self.values)) is None:
            return linear(x, dequantize(self.values, self.scales, x.dtype), bias, 1, out)
        if len(x) == 1:
            return ops.scaled_gemv(x, self.values, self.scales, False, bias, split_k, out)
        if len(x) <= MAX_GEMM_ROWS and self.suits_gemm:
            return self._gemm(ops, x, bias, split_k, out)
        return linear(x, ops.dequantize(self.values, self.scales, x.dtype), bias, 1, out)

    def _gemm(self, ops: ModuleType, x: Any, bias, split_k: int, out) -> torch.Tensor:
        """By our own kernel: [split_k, T, outputs], or [T, outputs] if split_k is 1."""
        y = ops.scaled_gemm(x, self.values, self.scales, split_k, out)
        if bias is not None:
            y += bias
        return y if split_k > 1 else y[0]

    def choose_split_k(self, layer: LinearBase, x: Any, bias, max_split_k: int) -> int:
        ops = triton_ops(self.values)
        if ops is None or bias is not None:
            return 1
        if len(x) == 1:
            return ops.choose_gemv_split_k(self.values.shape[1], max_split_k)
        if not (self.suits_gemm and 1 < len(x) <= self.max_split_k_rows):
            return 1
        return ops.choose_scaled_split_k(len(x), len(self.values), self.values.device, max_split_k)

    def gemv(self, ops: ModuleType, layer: LinearBase, x, norm_weight=None, eps=0.0, residual=None, gated=False):
        summed = x if residual is None else residual  # which the norm makes the sum
        if norm_weight is not None:
            x = ops.rms_norm(x, norm_weight, eps, residual)
        return ops.scaled_gemv(x, self.values, self.scales, gated, layer.bias), summed

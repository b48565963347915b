"""Implements linear layers with FP8 weights and FP8 activations (W8A8) on GPUs with FP8 units.

A single row of activations is not quantized, because reading the weights limits the speed of the matmul. If there are
several rows, the kernel of the preceding norm or activation quantizes them. If nothing precedes the layer, a separate
kernel quantizes the rows.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import ops, variant
from nanovllm.kernels.activations import FUSED_ACTIVATIONS, SWIGLU
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.quantization.scaled import QuantScheme
from nanovllm.quantization.scaled_linear import ScaledLinear

BLOCK = (128, 128)  # the only block size that the library supports, besides whole rows
MAX_GEMM_ROWS = 32  # with more rows, the library computes the matmuls that `quantized_linear` does not compute


class FP8Linear(ScaledLinear):
    """The weight format for FP8 matmuls.

    If the preceding kernel has not quantized the rows of activations, FP8Linear quantizes them.
    """

    max_split_k_rows = 160  # up to this many rows, a split GEMM with few output tiles is faster than the library
    min_rows = 2  # a single row is not quantized, because reading the weights limits its speed

    def __init__(self, layer: LinearBase, scheme: QuantScheme):
        super().__init__(layer, scheme)
        self.suits_gemm = self.block.columns >= ops.min_block_columns(self.values)
        n, k = self.values.shape
        is_row = self.block.columns == k
        self.group = k if is_row else self.block.columns  # inputs of activations that share a scale
        # the library takes scales of whole rows, or of blocks, which it reads four at a time
        has_library_scales = self.block.rows == 1 if is_row else self.block == BLOCK and k // 128 % 4 == 0
        self.library_multiplies = (
            has_library_scales and n % 16 == k % 16 == 0 and _has_scaled_mm(self.values.device, is_row)
        )
        if variant.get():  # batch_invariant: any number of rows is computed in the same way
            self.min_rows, self.library_multiplies = 1, False

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        if len(x) < self.min_rows or not self.suits_gemm:
            return super().linear(layer, x, bias, split_k, out)
        if not isinstance(x, ops.QuantizedRows):
            x = ops.quantize_rows(x, self.group)
        y = NotImplemented if variant.get() else ops.quantized_linear(x, self.values, self.scales, split_k, out)
        if y is NotImplemented:
            is_few = split_k > 1 or len(x) <= MAX_GEMM_ROWS
            if not is_few and self.library_multiplies and x.dtype == torch.bfloat16:
                return self._scaled_mm(x, bias, out)
            y = ops.split_k_gemm(x, (self.values, self.scales), split_k, out)
        if bias is not None:
            y += bias
        return y if split_k > 1 else y[0]

    def norm_linear(self, layer: LinearBase, x: NormInput, act: nn.Module | None) -> Any:
        if len(x) < self.min_rows or not self.suits_gemm:
            return super().norm_linear(layer, x, act)
        rows = self._quantized(x)
        if isinstance(act, FP8SiluAndMul) and (y := self._swiglu(layer, rows, act)) is not NotImplemented:
            return y
        y = self.linear(layer, rows, layer.bias)
        return y if act is None else act(y)

    def factors(self, layer: LinearBase, x: NormInput) -> tuple | None:
        return (self._quantized(x), self.values, self.scales) if self.group == self.block.rows == 128 else None

    def _swiglu(self, layer: LinearBase, rows: ops.QuantizedRows, act: "FP8SiluAndMul") -> Any:
        """Compute the matmul and the activation in one kernel, or return NotImplemented if no kernel can."""
        if variant.get() or layer.bias is not None or act.consumer.group != ops.SWIGLU_GROUP:
            return NotImplemented
        return ops.swiglu_quantize(rows, self.values, self.scales)

    def _quantized(self, x: NormInput) -> ops.QuantizedRows:
        """Quantize x in the norm's kernel if possible.

        A separate kernel quantizes x if the norm has already been computed, or if the norm's kernel adds the results of
        several ranks.
        """
        residual = x.residual_before
        if x.total is not None:
            return ops.quantize_rows(x.tensor(), self.group)
        parts, own_norm = ops.own_norm_of(x.x, residual, x.eps)
        if parts.barrier is not None:
            return ops.quantize_rows(x.tensor(), self.group)
        if residual is None:
            x.total = parts.reduce()
            return ops.rms_norm_quantize(x.total, x.weight, x.eps, None, 1, self.group)
        x.total = residual
        return ops.rms_norm_quantize(parts.parts, x.weight, x.eps, residual, parts.split_k, self.group, own_norm)

    def _scaled_mm(self, x, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        y = torch._scaled_mm(
            x.values,
            self.values.t(),
            scale_a=x.scales,
            scale_b=self.scales.t(),
            out_dtype=x.dtype,
            use_fast_accum=self.block.rows == 1,  # sums of blocks are added in float32
        )[: len(x)]
        if bias is not None:
            y += bias
        return y if out is None else out[0].copy_(y)

    def act_fn(self) -> "FP8SiluAndMul":
        """Return an activation module that quantizes its results for this layer."""
        return FP8SiluAndMul(self)


class FP8SiluAndMul(SiluAndMul):
    def __init__(self, consumer: FP8Linear):
        super().__init__()
        self.consumer = consumer

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) < self.consumer.min_rows or not self.consumer.suits_gemm:
            return super().forward(x)
        return ops.silu_and_mul_quantize(x, self.consumer.group)


FUSED_ACTIVATIONS[FP8SiluAndMul.forward] = SWIGLU


@cache
def _has_scaled_mm(device: torch.device, is_row: bool) -> bool:
    """Return whether PyTorch can multiply e4m3 matrices with scales.

    If `is_row` is True, each row has a scale. If not, each block has a scale.
    """
    if device.type != "cuda":
        return False
    size = 512
    x = torch.zeros(16, size, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    w = torch.zeros(size, size, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x_scales = torch.ones(1 if is_row else size // 128, 16, device=device).t()
    w_scales = torch.ones(size if is_row else size // 128, 1 if is_row else size // 128, device=device)
    try:
        torch._scaled_mm(x, w.t(), scale_a=x_scales, scale_b=w_scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True

"""Selects the kernel of a matmul with 8-bit weights by the number of rows."""

import triton

from nanovllm.kernels.activations import SWIGLU, activation_of
from nanovllm.kernels.hopper.hopper_tiles import hopper_tile
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, num_sms
from nanovllm.kernels.linear.split_k_gemm import TILE_N, split_k_gemm, tile_m_of
from nanovllm.kernels.linear.tiles import SWIGLU_GROUP, QuantizedRows, block_shape
from nanovllm.quantization.kernels.scaled_gemv import choose_gemv_split_k, scaled_gemv

MAX_SCALED_ROWS = 64  # with more rows, a kernel converts the weights for a GEMM of the library
MIN_BLOCK_COLUMNS = 32  # the minimum number of inputs per step of FP8 tensor cores and of our GEMM kernels


def scaled_linear(x, values, scales, bias=None, act=None, split_k=1, out=None):
    x = x.contiguous()
    if len(x) == 1:
        return scaled_gemv(x, (values, scales), activation_of(act), bias, split_k, out)
    if len(x) > MAX_SCALED_ROWS or not suits_scaled_gemm(values, scales):
        return NotImplemented
    y = split_k_gemm(x, (values, scales), split_k, out)
    if bias is not None:
        y += bias
    y = y if split_k > 1 else y[0]
    return y if act is None else act(y)


def suits_scaled_gemm(values, scales) -> bool:
    return block_shape(values, scales)[1] >= MIN_BLOCK_COLUMNS


def min_block_columns(values) -> int:
    return MIN_BLOCK_COLUMNS


def best_scaled_split_k(values, scales, num_rows, max_split_k, max_rows=None):
    if num_rows == 1:
        return choose_gemv_split_k(values.shape[1], max_split_k)
    # max_rows is only given for quantized rows
    if max_rows is not None and (tile := hopper_tile(num_rows, values, scales, max_split_k)) is not None:
        return tile.split_k
    if not 1 < num_rows <= (max_rows or MAX_SCALED_ROWS) or not suits_scaled_gemm(values, scales):
        return 1
    num_tiles = triton.cdiv(len(values), TILE_N) * triton.cdiv(num_rows, tile_m_of(num_rows))
    return max(1, min(max_split_k, 2 * num_sms(values.device) // num_tiles))


def swiglu_quantize(x: QuantizedRows, values, scales) -> QuantizedRows:
    """Return `silu_and_mul_quantize(x W^T)`, which is [M, N / 2]. Each group of SWIGLU_GROUP results shares a scale.

    The outputs of the gate and up projections are not rounded before SwiGLU. Return NotImplemented if no kernel
    supports the arguments, or if there are too few rows to fill the GPU.
    """
    n, k = values.shape
    groups = *block_shape(values, scales), k // x.scales.shape[1]
    num_tiles = triton.cdiv(len(x), 128) * (n // 256)
    if not has_hopper_kernels() or groups != (SWIGLU_GROUP,) * 3 or n % 256 or num_tiles < 2.7 * num_sms(values.device):
        return NotImplemented
    from nanovllm.kernels.hopper.hopper_gated import gated_linear  # it needs Gluon of Triton 3.6

    return gated_linear(x, values, SWIGLU, scales)

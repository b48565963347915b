"""Products with 8-bit weights, by the kernel that is fastest for so many rows."""

from nanovllm.kernels.scaled_gemm import choose_scaled_split_k, scaled_gemm
from nanovllm.kernels.scaled_gemv import choose_gemv_split_k, scaled_gemv
from nanovllm.kernels.tiles import block_shape

MAX_SCALED_ROWS = 64  # with more rows, weights are converted once, for a product of the library
MIN_BLOCK_COLUMNS = 32  # the least that tensor cores multiply in FP8, and so do our matrix products


def scaled_linear(x, values, scales, bias=None, act=None, split_k=1, out=None):
    if len(x) == 1:
        return scaled_gemv(x, values, scales, act is not None, bias, split_k, out)
    if len(x) > MAX_SCALED_ROWS or not suits_scaled_gemm(values, scales):
        return NotImplemented
    y = scaled_gemm(x, values, scales, split_k, out)
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
    if not 1 < num_rows <= (max_rows or MAX_SCALED_ROWS) or not suits_scaled_gemm(values, scales):
        return 1
    return choose_scaled_split_k(num_rows, len(values), values.device, max_split_k)

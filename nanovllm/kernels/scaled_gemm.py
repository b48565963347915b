"""y = x W^T for several rows of x, where W is 8-bit values times scales of blocks; also split along K, for few rows.

x may be quantized too, to e4m3, for GPUs with FP8 units. Otherwise W is converted to the dtype of x.
"""

import torch
import triton

from nanovllm.kernels.dependent_launch import has_hopper_kernels, num_sms
from nanovllm.kernels.split_k_gemm import split_k_product
from nanovllm.kernels.tiles import QuantizedRows, Tiles, block_shape

HOPPER_BLOCK = 128  # inputs, and outputs, that share a scale in hopper_gemm.py


def _tiles(num_rows: int) -> Tiles:
    """Two programs or more fit on a multiprocessor."""
    tile_m = min(128, max(16, triton.next_power_of_2(num_rows)))
    return Tiles(64, 128, 6 if tile_m <= 32 else 4, 4, tile_m)


def choose_scaled_split_k(num_rows: int, num_outputs: int, device: torch.device, max_split_k: int) -> int:
    """The best number of partial sums, at most `max_split_k`, for `scaled_gemm` of a product."""
    tiles = _tiles(num_rows)
    num_tiles = triton.cdiv(num_outputs, tiles.tile_n) * triton.cdiv(num_rows, tiles.tile_m)
    return max(1, min(max_split_k, 2 * num_sms(device) // num_tiles))


def scaled_gemm(
    x: torch.Tensor | QuantizedRows,
    values: torch.Tensor,
    scales: torch.Tensor,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times W transposed, split along K: [split_k, M, N], whose sum is the product.

    W is values [N, K] times scales [N / block rows, K / block columns], of at least 32 columns. All contiguous. `out`
    takes the result.
    """
    return split_k_product(x, values, scales, _tiles(len(x)), split_k, out)


def hopper_gemm(
    x: QuantizedRows, values: torch.Tensor, scales: torch.Tensor, gated: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor | QuantizedRows:
    """y = x W^T [M, N] for many rows, with scales of blocks of 128; if gated, `silu_and_mul_quantize` of y.

    NotImplemented where there is no such kernel, or not enough rows for it.
    """
    n, k = values.shape
    num_tiles = triton.cdiv(len(x), 128) * triton.cdiv(n, 256)
    if not has_hopper_kernels() or x.dtype == torch.float32 or num_tiles < 2 * num_sms(values.device):
        return NotImplemented
    blocks = *block_shape(values, scales), k // x.scales.shape[1]
    if blocks != (HOPPER_BLOCK,) * 3 or n % (2 * HOPPER_BLOCK if gated else HOPPER_BLOCK):
        return NotImplemented
    from nanovllm.kernels.hopper_gemm import multiply  # which imports what few versions of Triton have

    return multiply(x, values, scales, gated, out)

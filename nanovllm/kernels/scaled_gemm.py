"""y = x W^T for several rows of x, where W is 8-bit values times scales of blocks; also split along K, for few rows.

x may be quantized too, to e4m3, for GPUs with FP8 units. Otherwise W is converted to the dtype of x.
"""

import torch
import triton

from nanovllm.kernels.devices import has_hopper_kernels, num_sms
from nanovllm.kernels.split_k_gemm import split_k_product
from nanovllm.kernels.tiles import QuantizedRows, Tiles, block_shape

SWIGLU_GROUP = 128  # inputs, outputs, and weights in both directions that share a scale in hopper_swiglu.py


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


def swiglu_quantize(x: QuantizedRows, values: torch.Tensor, scales: torch.Tensor) -> QuantizedRows:
    """`silu_and_mul_quantize` of x W^T, in groups of SWIGLU_GROUP: [M, K] -> [M, N / 2], without rounding in between.

    NotImplemented where there is no kernel for it, or as long as too few rows would leave it idle.
    """
    n, k = values.shape
    groups = *block_shape(values, scales), k // x.scales.shape[1]
    num_tiles = triton.cdiv(len(x), 128) * (n // 256)
    if not has_hopper_kernels() or groups != (SWIGLU_GROUP,) * 3 or n % 256 or num_tiles < 2.7 * num_sms(values.device):
        return NotImplemented
    from nanovllm.kernels.hopper_swiglu import swiglu  # which imports what few versions of Triton have

    return swiglu(x, values, scales)

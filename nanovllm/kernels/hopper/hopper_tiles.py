"""When Hopper's kernels are used: for which products in FP8 (hopper_scaled_gemm.py), and in which tiles; for which rows
of qkv (hopper_qkv.py). Importing this takes no Gluon.

Kernels, one by one, says what they gain: [in FP8](../../docs/lab-notes.md#few-rows-in-fp8), [with the
store](../../docs/lab-notes.md#norm-rope-and-store-in-the-product).
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, num_sms
from nanovllm.kernels.linear.tiles import QuantizedRows, block_shape

BLOCK = 128, 128  # of weights that share a scale
MIN_BUSY = 0.7  # of the multiprocessors
MAX_CAPTURED_ROWS = 8192  # of any CUDA graph of a step with chunks
# of a row of the qkv weight, up to which product and store are one kernel: what this saves, a pass over the outputs,
# does not grow with the inputs; with longer rows (Qwen3-8B in 16 bits) prefill gained nothing
MAX_ROW_BYTES = 5120


class HopperTile(NamedTuple):
    """A tile of the result, and how a program computes it."""

    rows: int
    outputs: int
    split_k: int = 1
    burst: int = 2  # blocks of inputs that are loaded together
    stages: int = 16  # blocks that are loaded ahead, if there is memory for so many
    registers: int = 168  # of a thread, in the mean


# up to so many rows, and with at least so many blocks of inputs for each part: tiles, of which the largest is the best
TILES = (
    (64, 8, [HopperTile(64, outputs, stages=6, registers=128) for outputs in (192, 128, 64)]),
    (128, 16, [HopperTile(128, 192), HopperTile(128, 64, stages=8, registers=96)]),
    (256, 16, [HopperTile(256, 192, burst=1), HopperTile(128, 192), HopperTile(128, 128)]),
)


def choose_tile(num_rows: int, n: int, k: int, max_split_k: int, sms: int) -> HopperTile | None:
    """For a product [num_rows, k] times [n, k] transposed; None where other kernels are as fast.

    Only the largest tiles are better than those of the library where a program has several.
    """
    if not 16 < num_rows <= TILES[-1][0]:
        return None
    _, min_blocks, tiles = next(size for size in TILES if num_rows <= size[0])
    for tile in tiles:
        count = -(-num_rows // tile.rows) * -(-n // tile.outputs)
        split_k = max(1, min(max_split_k, sms // count, k // 128 // min_blocks))
        rounds = -(-count * split_k // sms)
        if count * split_k > MIN_BUSY * rounds * sms and (rounds == 1 or tile is tiles[0]):
            return tile._replace(split_k=split_k)
    return None


def hopper_tile(num_rows: int, values: torch.Tensor, scales: torch.Tensor, max_split_k: int) -> HopperTile | None:
    """The tile with which `quantized_linear` computes a product, in as many parts as pay, up to `max_split_k`."""
    if not has_hopper_kernels() or block_shape(values, scales) != BLOCK:
        return None
    return choose_tile(num_rows, *values.shape, max_split_k, num_sms(values.device))


def quantized_linear(
    x: QuantizedRows, values: torch.Tensor, scales: torch.Tensor, split_k: int, out: torch.Tensor | None
) -> torch.Tensor:
    """`split_k_gemm` of quantized rows; NotImplemented where another kernel is as fast, or there is none for it."""
    tile = hopper_tile(len(x), values, scales, split_k)
    if tile is None or tile.split_k != split_k or x.dtype == torch.float32:
        return NotImplemented
    assert x.scales.shape[1] == values.shape[1] // BLOCK[1]
    from nanovllm.quantization.kernels.hopper_scaled_gemm import (
        hopper_scaled_gemm,  # imports what few versions of Triton have
    )

    return hopper_scaled_gemm(x, values, scales, tile, out)


def qkv_norm_rope_store(x, layer, qk_norm_rope, slot_mapping: torch.Tensor, cache) -> torch.Tensor:
    """`norm_rope_and_store` of what a linear layer makes of the NormInput x, with the product in one kernel.

    NotImplemented where there is no kernel for it or it gains nothing, or if CUDA graphs may hold a step of so many
    rows: they pad steps, and a step shall have the same kernels with graphs and without, as others add up in another
    order.
    """
    if isinstance(x, torch.Tensor) or len(x) <= MAX_CAPTURED_ROWS or not has_hopper_kernels():
        return NotImplemented
    if layer.bias is not None or not hasattr(layer, "weight"):  # other formats may have other names
        return NotImplemented
    (n, k), (kv_heads, head_dim), rotary = layer.weight.shape, cache.k.shape[2:], qk_norm_rope[3].shape[2]
    suits = head_dim == rotary == 128 and n % 256 == kv_heads % 2 == k % 8 == 0 and cache.k.element_size() == 2
    pays = k * layer.weight.element_size() <= MAX_ROW_BYTES
    if not (suits and pays) or (factors := layer.format.factors(layer, x)) is None:
        return NotImplemented
    from nanovllm.kernels.hopper.hopper_qkv import store_product  # imports what few versions of Triton have

    return store_product(factors, qk_norm_rope, slot_mapping, cache)

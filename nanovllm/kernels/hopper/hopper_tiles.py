"""Decides which matmuls run in hopper_scaled_gemm.py (FP8), hopper_packed_gemm.py (4 bits) and hopper_qkv.py.

This module does not import Gluon.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, num_sms
from nanovllm.kernels.linear.tiles import QuantizedRows, block_shape

BLOCK = 128, 128  # weights that share a scale
MIN_BUSY = 0.7  # the fraction of multiprocessors that tiles must keep busy
MAX_CAPTURED_ROWS = 8192  # the maximum number of rows in a CUDA graph of a step with prefill chunks
# One kernel computes the matmul and the store if a row of the qkv weight has at most this size. This saves a pass over
# the outputs. With longer rows, the pass is a smaller part of the time: prefill of Qwen3-8B in 16 bits was not faster.
MAX_ROW_BYTES = 5120


class HopperTile(NamedTuple):
    """The size of an output tile, and how a program computes the tile."""

    rows: int
    outputs: int
    split_k: int = 1
    burst: int = 2  # blocks of inputs that are loaded together
    stages: int = 16  # the maximum number of bursts that are loaded ahead; shared memory may allow fewer
    registers: int = 168  # per thread, on average


# (maximum rows, minimum blocks of inputs per split, tiles from the largest and best to the smallest)
TILES = (
    (64, 8, [HopperTile(64, outputs, stages=6, registers=128) for outputs in (192, 128, 64)]),
    (128, 16, [HopperTile(128, 192), HopperTile(128, 64, stages=8, registers=96)]),
    (256, 16, [HopperTile(256, 192, burst=1), HopperTile(128, 192), HopperTile(128, 128)]),
)


def choose_tile(num_rows: int, n: int, k: int, max_split_k: int, sms: int) -> HopperTile | None:
    """Return the tile to multiply x [num_rows, k] by a weight [n, k], or `None` if other kernels are as fast.

    If each program must compute several tiles, only the largest tiles are faster than PyTorch's FP8 matmul.
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
    """Return the tile for `quantized_linear`, or `None` if another kernel should run.

    The tile's `split_k` is the best value up to `max_split_k`.
    """
    if not has_hopper_kernels() or block_shape(values, scales) != BLOCK:
        return None
    return choose_tile(num_rows, *values.shape, max_split_k, num_sms(values.device))


def quantized_linear(
    x: QuantizedRows, values: torch.Tensor, scales: torch.Tensor, split_k: int, out: torch.Tensor | None
) -> torch.Tensor:
    """Compute `split_k_gemm` for x [T, K] and the weight `values` [N, K]. The result is [split_k, T, N].

    Return `NotImplemented` if the Hopper kernel is not the fastest or does not support the operands.
    """
    tile = hopper_tile(len(x), values, scales, split_k)
    if tile is None or tile.split_k != split_k or x.dtype == torch.float32:
        return NotImplemented
    assert x.scales.shape[1] == values.shape[1] // BLOCK[1]
    from nanovllm.quantization.kernels.hopper_scaled_gemm import (
        hopper_scaled_gemm,  # needs Gluon of Triton 3.6
    )

    return hopper_scaled_gemm(x, values, scales, tile, out)


SMALL_TILE_M = 8  # up to this many rows of x, `mma.sync` multiplies 4-bit weights faster than `wgmma`
MAX_PACKED_ROWS = 512  # with more rows, converting the weights for a GEMM of the library is faster


def packed_tile(x: torch.Tensor, weight, max_split_k: int) -> HopperTile | None:
    """Return the tile size of the kernel that multiplies x [M, K] by a Packed weight.

    The result is `None` if another kernel should run. `split_k` of the result is the best value up to `max_split_k`.
    """
    if not suits_packed_kernels(x, weight):
        return None
    (num_rows, k), needs_few_registers = x.shape, weight.zeros is None and weight.group_size % 128 == 0
    return choose_packed_tile(num_rows, len(weight.words), k, max_split_k, num_sms(x.device), needs_few_registers)


def suits_packed_kernels(x: torch.Tensor, weight) -> bool:
    """Return whether Hopper kernels can multiply x by a Packed weight, or by a stack of Packed weights."""
    if not has_hopper_kernels() or x.dtype == torch.float32 or weight.k % 8 or weight.group_ids is not None:
        return False
    # float16 can't represent all scales that are powers of two
    return x.dtype == torch.bfloat16 or weight.scales.dtype != torch.float8_e8m0fnu


def packed_expert_tile(tile_m: int, num_tiles: int, n: int, sms: int) -> HopperTile:
    """Return the tile for `num_tiles` matmuls of `tile_m` rows by an expert's weight with `n` rows."""
    if tile_m == SMALL_TILE_M:
        return _with_stages(tile_m, 64, 1, 3 if num_tiles * -(-n // 64) > 4 * sms else 2)
    outputs = 64 if num_tiles * -(-n // 128) < 2 * sms else 128
    return _with_stages(tile_m, outputs, 1, programs=2 if tile_m <= 64 else 1)


def choose_packed_tile(
    num_rows: int, n: int, k: int, max_split_k: int, sms: int, needs_few_registers: bool
) -> HopperTile | None:
    if not 0 < num_rows <= MAX_PACKED_ROWS:
        return None
    rows, outputs = min(128, max(SMALL_TILE_M, 1 << (num_rows - 1).bit_length())), 64 if num_rows <= 128 else 128
    count, min_blocks = -(-num_rows // rows) * -(-n // outputs), 8 if rows <= 32 else 16
    split_k = max(1, min(max_split_k, 2 * sms // count, -(-k // 128) // min_blocks))
    # this many programs share the registers and the memory of a multiprocessor
    programs = 2 if rows <= 64 else 1
    if rows <= 16 and needs_few_registers and count * split_k > 2 * sms:
        programs = 3
    return _with_stages(rows, outputs, split_k, programs, burst=2 if rows == SMALL_TILE_M and programs == 3 else 1)


def _with_stages(rows: int, outputs: int, split_k: int, programs: int, burst: int = 1) -> HopperTile:
    """Return a tile with as many stages as fit into a multiprocessor that runs `programs` programs at a time."""
    sum_bytes, stage_bytes = rows * 256 if outputs == 64 else 0, burst * (outputs * 64 + rows * 256)
    stages = min(8, (216 * 2**10 // programs - sum_bytes) // stage_bytes)
    if outputs == 64:  # warpgroups that take alternate bursts must not share buffers: see hopper_packed_gemm.py
        stages -= stages % 2
    return HopperTile(rows, outputs, split_k, burst, stages, {1: 168, 2: 80, 3: 56}[programs])


def qkv_norm_rope_store(x, layer, qk_norm_rope, slot_mapping: torch.Tensor, cache) -> torch.Tensor:
    """Compute the qkv matmul of the `NormInput` x and then `norm_rope_and_store`, in one kernel.

    Return `NotImplemented` if no kernel supports the operands, or if separate kernels are as fast. Also return
    `NotImplemented` if CUDA graphs may contain steps with this number of rows. CUDA graphs pad steps, but a padded step
    must use the same kernels as a step without graphs. Different kernels add values in different orders, which might
    lead to different tokens.
    """
    if isinstance(x, torch.Tensor) or len(x) <= MAX_CAPTURED_ROWS or not has_hopper_kernels():
        return NotImplemented
    if layer.bias is not None or not hasattr(layer, "weight"):  # other weight formats may use other names
        return NotImplemented
    (n, k), (kv_heads, head_dim), rotary = layer.weight.shape, cache.k.shape[2:], qk_norm_rope[3].shape[2]
    suits = head_dim == rotary == 128 and n % 256 == kv_heads % 2 == k % 8 == 0 and cache.k.element_size() == 2
    pays = k * layer.weight.element_size() <= MAX_ROW_BYTES
    if not (suits and pays) or (factors := layer.format.factors(layer, x)) is None:
        return NotImplemented
    from nanovllm.kernels.hopper.hopper_qkv import store_product  # needs Gluon of Triton 3.6

    return store_product(factors, qk_norm_rope, slot_mapping, cache)

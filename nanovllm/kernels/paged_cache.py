"""What kernels know of the cache of keys and values when they are compiled."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class CacheLayout(NamedTuple):
    """Of a cache [blocks, block_size, kv_heads, head_dim], and how it is read; a constant of kernels."""

    block_size: int
    kv_heads: int
    head_dim: int
    tile: int = 0  # keys that are read at a time, which lie in one block
    window: int = 0  # the last so many keys are seen; 0 is all


def layout_of(k_cache: torch.Tensor, max_tile: int, window: int | None) -> CacheLayout:
    """A tile is the largest power of two that divides a block, up to `max_tile`, itself a power of two."""
    block_size = k_cache.shape[1]
    return CacheLayout(*k_cache.shape[1:], min(max_tile, block_size & -block_size), window or 0)


@triton.jit
def prefetch_rows(starts, SIZE: tl.constexpr):
    """Prefetch SIZE elements from each of a tensor of pointers on into the L2 cache, without waiting for them."""
    LINE: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    lines = starts[:, None] + tl.arange(0, (SIZE + LINE - 1) // LINE)[None, :] * LINE
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)

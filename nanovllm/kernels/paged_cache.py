"""What kernels know of the cache of keys and values when they are compiled."""

from typing import NamedTuple

import torch


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

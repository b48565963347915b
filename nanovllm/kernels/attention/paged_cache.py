"""What kernels know of the cache of keys and values when they are compiled.

Functions that launch them take a layer's `cache` with keys `k` and values `v` [blocks, block_size, kv_heads, head_dim],
their `scales` if they are in FP8 (see e4m3.py), the `window` of tokens that one attends to, or None, and the `scale` of
scores: a KVCache of cache/kv_cache.py. Scales are pairs for a key and its value, bfloat16 in an int32, [blocks,
kv_heads, block_size].
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch.gpu_features import has_tma

LOG2_E = 1.4426950408889634  # attention computes powers of two


class CacheLayout(NamedTuple):
    """The sizes of a cache, and how it is read; a constant of kernels."""

    block_size: int
    kv_heads: int
    head_dim: int
    tile: int = 0  # keys that are read at a time, which lie in one block
    window: int = 0  # the last so many keys are seen; 0 is all


def layout_of(cache, max_tile: int) -> CacheLayout:
    """A tile is the largest power of two that divides a block, up to `max_tile`, itself a power of two."""
    block_size = cache.k.shape[1]
    return CacheLayout(*cache.k.shape[1:], min(max_tile, block_size & -block_size), cache.window or 0)


def log2_scale(cache) -> float:
    """What scores are multiplied by: their exponentials are powers of two."""
    return (cache.scale or cache.k.shape[3] ** -0.5) * LOG2_E


def cache_tiles(cache, layout: CacheLayout) -> tuple:
    """What kernels of chunks load tiles of keys and of values from: descriptors, or pointers without TMA."""
    if not has_tma(cache.k.device):
        return cache.k, cache.v
    shape = [layout.tile, layout.head_dim]
    return tuple(TensorDescriptor.from_tensor(x.flatten(0, 1).flatten(1), shape) for x in (cache.k, cache.v))


@triton.jit
def prefetch_rows(starts, SIZE: tl.constexpr):
    """Prefetch SIZE elements from each of a tensor of pointers on into the L2 cache, without waiting for them."""
    LINE: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    lines = starts[:, None] + tl.arange(0, (SIZE + LINE - 1) // LINE)[None, :] * LINE
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)

"""The compile-time description of a KV cache, for kernels.

Functions that launch kernels use the following attributes of a layer's `cache`, a `KVCache` (cache/kv_cache.py):

- keys `k` and values `v` [blocks, block_size, kv_heads, head_dim].
- `scales` [blocks, kv_heads, block_size] int32, if keys and values are in FP8 (see e4m3.py). Each int32 word packs two
  bfloat16 scales: one for a key, and one for its value.
- `spec`: the layer's AttentionSpec.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch.gpu_features import has_tma

LOG2_E = tl.constexpr(1.4426950408889634)  # attention computes exp2 instead of exp


class CacheLayout(NamedTuple):
    """The sizes of a cache and of the tiles that kernels read, as a compile-time constant."""

    block_size: int
    kv_heads: int
    head_dim: int
    tile: int = 0  # keys that are read at a time, all in one block
    window: int = 0  # how many of the last keys a token sees; 0: all
    soft_cap: float = 0.0  # of scores; 0: none


def layout_of(cache, max_tile: int) -> CacheLayout:
    """Return the layout of a cache.

    The layout's tile size is the largest power of two that divides the block size and is at most `max_tile`.
    """
    block_size, spec = cache.k.shape[1], cache.spec
    tile = min(max_tile, block_size & -block_size)
    return CacheLayout(*cache.k.shape[1:], tile, spec.window or 0, spec.soft_cap or 0.0)


def log2_scale(cache) -> float:
    """Return log2(e) times the scale of the scores, because attention computes exp2 instead of exp."""
    return (cache.spec.scale or cache.k.shape[3] ** -0.5) * LOG2_E.value


def cache_tiles(cache, layout: CacheLayout) -> tuple:
    """Return the keys and the values for prefill kernels, as TMA descriptors or, without TMA, as tensors."""
    if not has_tma(cache.k.device):
        return cache.k, cache.v
    shape = [layout.tile, layout.head_dim]
    return tuple(TensorDescriptor.from_tensor(x.flatten(0, 1).flatten(1), shape) for x in (cache.k, cache.v))


@triton.jit
def tanh_of_scores(scores, scale, CAP: tl.constexpr):
    """Return tanh(score * s / CAP), where s is `scale` / log2(e).

    The capped score is CAP times the result.
    """
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 / CAP))))


@triton.jit
def add_sinks(acc, m_i, l_i, sinks):
    """Add the attention sinks [R] to the sums of softmax weights `l_i` [R].

    Return `acc` [R, D], `m_i` [R] and `l_i`, rescaled to the new maxima.

    `acc` is the sum of weighted values, and `m_i` is the largest score. `sinks` and `m_i` are already multiplied by
    log2(e).
    """
    m_new = tl.maximum(m_i, sinks)
    alpha = tl.exp2(m_i - m_new)
    return acc * alpha[:, None], m_new, l_i * alpha + tl.exp2(sinks - m_new)


@triton.jit
def prefetch_rows(starts, SIZE: tl.constexpr):
    """Start to prefetch SIZE elements into the L2 cache, from each pointer in `starts`."""
    LINE: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    lines = starts[:, None] + tl.arange(0, (SIZE + LINE - 1) // LINE)[None, :] * LINE
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)

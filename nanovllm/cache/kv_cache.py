"""The KV cache of a layer, which stores keys and values in blocks of tokens."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanovllm.config import Config

SPAN_SIZE = 16  # tokens that `gather` copies as one row; every `kvcache_block_size` is a multiple


@dataclass(frozen=True)
class AttentionSpec:
    """Describes what an attention layer stores and computes. cache/state.py explains specs, and lists the others.

    Specs that differ only in their sinks compare equal, because their layers store the same data.
    """

    num_kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None  # a token attends to this many tokens, including itself
    scale: float | None = None  # of scores; None is 1 / sqrt(head_dim)
    soft_cap: float | None = None  # a scaled score s becomes soft_cap * tanh(s / soft_cap)
    sinks: torch.Tensor | None = field(default=None, compare=False)  # [heads]: exp(sink) is added to softmax's sum
    of_states = False

    @property
    def is_special(self) -> bool:
        """Whether the layer has a soft cap or sinks, which some backends and kernels do not support."""
        return self.soft_cap is not None or self.sinks is not None

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        shape = (2, num_layers, num_blocks, config.kvcache_block_size, self.num_kv_heads, self.head_dim)
        return cache_type(config.kv_cache_dtype).tensors(shape, config.dtype)

    def make(self, parts: list[torch.Tensor], config: "Config") -> "KVCache":
        data = parts[0].view(2, -1, config.kvcache_block_size, self.num_kv_heads, self.head_dim)
        cache = cache_type(config.kv_cache_dtype)(data, *parts[1:])
        cache.spec = self
        return cache


class KVCache:
    """The keys and values of one layer, in the model's dtype. Subclasses store other formats (`quantization/`)."""

    scales: torch.Tensor | None = None  # of quantized subclasses
    spec = AttentionSpec()

    def __init__(self, data: torch.Tensor):
        self.k, self.v = data  # each [blocks, block_size, kv_heads, head_dim]

    @staticmethod
    def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a group of layers, on the meta device: see cache/state.py.

        `shape` is (2, layers, blocks, block_size, kv_heads, head_dim).
        """
        return (torch.empty(shape, dtype=dtype, device="meta"),)

    def store_kvcache(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to slots [T]. Slots must not be -1."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, spans: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of `spans` [B, L / SPAN_SIZE] in `dtype`, each [B, L, kv_heads, head_dim]."""
        return gather_spans(self.k, spans), gather_spans(self.v, spans)


def gather_spans(cache: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    rows = cache.view(-1, SPAN_SIZE * cache.shape[2] * cache.shape[3])
    if len(spans) == 1 and cache.is_cpu:  # adjacent spans need no copy
        ids = spans[0].tolist()
        if ids == [*range(ids[0], ids[-1] + 1)]:
            return rows[ids[0] : ids[-1] + 1].view(1, -1, *cache.shape[2:])
    return rows.index_select(0, spans.flatten()).view(len(spans), -1, *cache.shape[2:])


def cache_type(kv_cache_dtype: str) -> type[KVCache]:
    if kv_cache_dtype == "auto":
        return KVCache
    from nanovllm.quantization.fp8_cache import FP8KVCache  # imported lazily, because it is rarely needed

    return FP8KVCache

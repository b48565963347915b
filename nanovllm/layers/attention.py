"""Attention over the paged cache, from the qkv product to the input of the output projection: the layer, the cache
that it keeps, and what a backend is that computes it.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nanovllm.kernels import operation
from nanovllm.layers.rotary_embedding import QKNormRope, norm_rope
from nanovllm.utils.context import Context, get_context

CHUNK_SIZE = 16  # tokens that are gathered as one row; divides every `kvcache_block_size`


class KVCache:
    """The keys and values of one layer, in the dtype of the model. Other formats are subclasses: see `quantization/`.

    `k` and `v` are [blocks, block_size, kv_heads, head_dim]. `scales` is what kernels take besides. A token attends to
    `window` tokens, itself included, or to all.
    """

    scales: torch.Tensor | None = None
    window: int | None = None

    def __init__(self, data: torch.Tensor):
        """A layer's part of each tensor of `tensors`, without the dimension of the layers."""
        self.k, self.v = data

    @staticmethod
    def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What the caches of some layers consist of, as for `PagedKV.tensors`.

        shape is (2, layers, blocks, block_size, kv_heads, head_dim), that of the first tensor.
        """
        return (torch.empty(shape, dtype=dtype, device="meta"),)

    def store_kvcache(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to slots [T], which count tokens: none may be -1."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, chunks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, L, kv_heads, head_dim] of the chunks [B, L / CHUNK_SIZE] int32, in the model's dtype."""
        return gather_chunks(self.k, chunks), gather_chunks(self.v, chunks)


def gather_chunks(cache: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """-> [B, L, kv_heads, head_dim]; on a CPU a view, if these are the chunks of one sequence and follow each other."""
    rows = cache.view(-1, CHUNK_SIZE * cache.shape[2] * cache.shape[3])
    if len(chunks) == 1 and cache.is_cpu:
        first, end = (ids := chunks[0].tolist())[0], ids[-1] + 1
        if ids == [*range(first, end)]:
            return rows[first:end].view(1, -1, *cache.shape[2:])
    return rows.index_select(0, chunks.flatten()).view(len(chunks), -1, *cache.shape[2:])


class PagedKV(NamedTuple):
    """The spec of attention: a key and a value of each token and head, in blocks that a sequence's table lists.

    layers/state.py says what a spec is, and has the other one.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens behind it stay in their blocks, and are not read
    of_states = False

    def tensors(self, num_layers: int, num_blocks: int, config: Any) -> tuple[torch.Tensor, ...]:
        shape = (2, num_layers, num_blocks, config.kvcache_block_size, self.num_kv_heads, self.head_dim)
        return _cache_type(config.kv_cache_dtype).tensors(shape, config.dtype)

    def make(self, parts: list[torch.Tensor], config: Any) -> KVCache:
        cache = _cache_type(config.kv_cache_dtype)(*parts)
        cache.window = self.window
        return cache


def _cache_type(kv_cache_dtype: str) -> type[KVCache]:
    if kv_cache_dtype == "auto":
        return KVCache
    from nanovllm.quantization.fp8_cache import FP8KVCache  # imported lazily, as it is rarely needed

    return FP8KVCache


@operation
def norm_rope_and_store(
    qkv: torch.Tensor, qk_norm_rope: QKNormRope, slot_mapping: torch.Tensor, cache: KVCache
) -> torch.Tensor:
    """The queries [T, heads, head_dim] of qkv [T, heads + 2 kv_heads, head_dim]; keys and values go to their slots [T].

    This definition takes no slot of -1, which kernels leave out.
    """
    q_weight, k_weight, eps, cos_sin = qk_norm_rope
    num_kv_heads = cache.k.shape[2]
    num_qk = qkv.shape[1] - num_kv_heads
    num_heads, weight = num_qk - num_kv_heads, None
    if q_weight is not None:
        weight = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))
    # queries and keys in one call: small operations on a CPU cost the same whatever their size
    qk = norm_rope(qkv[:, :num_qk], weight, eps, cos_sin)
    cache.store_kvcache(slot_mapping.long(), qk[:, num_heads:], qkv[:, num_qk:])
    return qk[:, :num_heads]


class AttentionBackend:
    """Shapes: q [T, heads, head_dim]; the cache holds keys and values of this step's tokens too.

    heads is a multiple of kv_heads, and query head h reads key-value head h // (heads / kv_heads).
    """

    package, install = "torch", "pip install torch"  # what must be installed, and how
    block_multiple = CHUNK_SIZE  # what `kvcache_block_size` must be a multiple of
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # the formats of the cache that it reads
    uses_cuda_graphs = True  # decode never reads a result on the host
    captures_chunks = False  # nor does a step with chunks, which reads their number and lengths on the device

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """The types of the devices on which it runs; None: all that run PyTorch."""
        return None

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Called for each attention layer, before any step: `group` query heads share a key-value head."""

    def prepare_chunks(self, chunk_lens: list[int], first_row: int) -> dict[str, np.ndarray]:
        """int32 arrays for `Context.backend_arrays`, of a step whose rows from `first_row` on are chunks of prompts."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and largest dimensions of these arrays in a CUDA graph, where -1 is padding."""
        return ()

    def attend_qkv(self, qkv, qk_norm_rope: QKNormRope, cache: KVCache, context: Context) -> torch.Tensor:
        """Norm and rope of queries and keys, the store of keys and values, and `attend`, from the qkv product.

        qkv [T, heads + 2 kv_heads, head_dim] -> [T, heads, head_dim].
        """
        return self.attend(norm_rope_and_store(qkv, qk_norm_rope, context.slot_mapping, cache), cache, context)

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Each of a step's queries against the keys of its sequence up to its own -> [T, heads, head_dim].

        The rows of decodes come first. Where a sequence has no keys, which is padding, the result may be any.
        """
        raise NotImplementedError


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, with its optional q and k norm, rotary embedding and cache."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend, window: int | None = None
    ):
        """The numbers of heads are those of this rank; `window` is how many tokens one attends to, itself included.

        Only the plain backend reads it. For others, Config bounds the length by ModelConfig.sliding_window.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.backend = backend
        self.cache = KVCache(torch.empty(2, 0))

    def cache_spec(self) -> PagedKV:
        return PagedKV(self.num_kv_heads, self.head_dim, self.window)

    def forward(self, qkv: torch.Tensor, qk_norm_rope: QKNormRope) -> torch.Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv_heads, head_dim]
        return self.backend.attend_qkv(qkv, qk_norm_rope, self.cache, get_context()).flatten(1)

"""The interface of an attention backend."""

import numpy as np
import torch

from nanovllm.cache.kv_cache import SPAN_SIZE, KVCache
from nanovllm.utils.context import Context


class AttentionBackend:
    """Computes the attention of a step. The cache already holds the keys and values of the step's tokens.

    heads is a multiple of kv_heads, and query head h reads key-value head h // (heads / kv_heads).
    """

    package, install = "torch", "pip install torch"  # the package that must be installed, and how to install it
    block_multiple = SPAN_SIZE  # divides `kvcache_block_size`
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # the values of `kv_cache_dtype` that it supports
    uses_cuda_graphs = True  # whether graphs can contain decodes: then nothing is read on the host
    captures_chunks = False  # whether they can contain chunks: then lengths are read on the device

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """The device types on which it runs; None: all that run PyTorch."""
        return None

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Called for each attention layer before any step: `group` query heads share a key-value head."""

    def prepare_chunks(self, chunks: list[tuple[int, int]], first_row: int) -> dict[str, np.ndarray]:
        """int32 arrays for `Context.backend_arrays`. Rows from `first_row` on are the chunks (start, end)."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and largest shapes of these arrays in a CUDA graph, which pads them with -1."""
        return ()

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Attention of a step's queries q [T, heads, head_dim] -> [T, heads, head_dim]. Rows of decodes come first.

        Each query sees the keys of its sequence up to its own position, or the last `cache.window` of them. Scores are
        multiplied by `cache.scale`; None is 1 / sqrt(head_dim). Results of padding, which has no keys, are arbitrary.
        """
        raise NotImplementedError

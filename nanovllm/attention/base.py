"""What computes attention: the interface of a backend."""

import numpy as np
import torch

from nanovllm.cache.kv_cache import SPAN_SIZE, KVCache
from nanovllm.utils.context import Context


class AttentionBackend:
    """Shapes: q [T, heads, head_dim]; the cache holds keys and values of this step's tokens too.

    heads is a multiple of kv_heads, and query head h reads key-value head h // (heads / kv_heads).
    """

    package, install = "torch", "pip install torch"  # what must be installed, and how
    block_multiple = SPAN_SIZE  # what `kvcache_block_size` must be a multiple of
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # the formats of the cache that it reads
    uses_cuda_graphs = True  # decode never reads a result on the host
    captures_chunks = False  # whether graphs contain steps with chunks, whose lengths are then read on the device

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """The types of the devices on which it runs; None: all that run PyTorch."""
        return None

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Called for each attention layer, before any step: `group` query heads share a key-value head."""

    def prepare_chunks(self, chunks: list[tuple[int, int]], first_row: int) -> dict[str, np.ndarray]:
        """int32 arrays for `Context.backend_arrays`: rows from `first_row` on are chunks of prompts, (start, end)."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and largest dimensions of these arrays in a CUDA graph, where -1 is padding."""
        return ()

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Each of a step's queries against the keys of its sequence up to its own -> [T, heads, head_dim].

        With `cache.window`, against the last so many of them. Scores are multiplied by `cache.scale`. The rows of
        decodes come first. Where a sequence has no keys, which is padding, the result may be any.
        """
        raise NotImplementedError

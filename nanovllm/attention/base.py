"""The interface of an attention backend."""

import numpy as np
import torch

from nanovllm.cache.kv_cache import SPAN_SIZE, KVCache
from nanovllm.utils.context import Context


class AttentionBackend:
    """Computes the attention of a step. The cache already contains the keys and values of the step's tokens.

    `heads` is a multiple of `kv_heads`, and query head `h` reads key-value head `h // (heads / kv_heads)`.
    """

    package, install = "torch", "pip install torch"  # the package that must be installed, and how to install it
    block_multiple = SPAN_SIZE  # a divisor of `kvcache_block_size`
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # supported values of `kv_cache_dtype`
    uses_cuda_graphs = True  # whether graphs can contain decodes; if so, the host reads no data
    captures_chunks = False  # whether graphs can contain chunks; if so, only the device reads lengths

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """Return the supported device types. None means all devices of PyTorch."""
        return None

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Prepare for an attention layer with `group` query heads per key-value head. Called before any step."""

    def prepare_chunks(self, chunks: list[tuple[int, int]], first_row: int) -> dict[str, np.ndarray]:
        """Return int32 arrays for `Context.backend_arrays`. Row `first_row` is the first of the chunks (start, end)."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names and largest shapes of the arrays from `prepare_chunks` in a CUDA graph. -1 is padding."""
        return ()

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Compute attention for a step's queries q [T, heads, head_dim]. The output has the shape of q.

        Decodes come first. Each query sees its sequence's keys up to the query's position, or the last `cache.window`
        of these keys. Scores are multiplied by `cache.scale`, or by 1 / sqrt(head_dim) if `cache.scale` is None.
        Padding rows see no keys, and their results are undefined.
        """
        raise NotImplementedError

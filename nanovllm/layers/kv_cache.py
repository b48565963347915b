"""Where attention keeps its keys and values."""

from math import gcd

import torch


class KVCache:
    """The keys and values of one layer, in the dtype of the model. Other formats are subclasses: see `quantization/`.

    `k` and `v` are [blocks, block_size, kv_heads, head_dim]. `scales` is what kernels take besides.
    """

    scales: torch.Tensor | None = None

    def __init__(self, data: torch.Tensor):
        """A layer's part of each tensor of `tensors`, without the dimension of the layers."""
        self.k, self.v = data

    @staticmethod
    def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What a cache consists of, on the meta device; in all tensors, dimensions 1 and 2 are the layers and blocks.

        shape is (2, layers, blocks, block_size, kv_heads, head_dim), that of the first tensor.
        """
        return (torch.empty(shape, dtype=dtype, device="meta"),)

    def store_kvcache(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to slots [T], which count tokens: none may be -1."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, chunks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, L, kv_heads, head_dim] of the chunks [B, L / chunk_size] int32, in the model's dtype."""
        return gather_chunks(self.k, chunks), gather_chunks(self.v, chunks)


def chunk_size(block_size: int) -> int:
    """Tokens that are gathered as one row: long rows are fast, and CPU kernels are compiled for fewer shapes."""
    return gcd(block_size, 16)


def gather_chunks(cache: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """-> [B, L, kv_heads, head_dim]; on a CPU a view, if these are the chunks of one sequence and follow each other."""
    rows = cache.view(-1, chunk_size(cache.shape[1]) * cache.shape[2] * cache.shape[3])
    if len(chunks) == 1 and cache.is_cpu:
        first, end = (ids := chunks[0].tolist())[0], ids[-1] + 1
        if ids == [*range(first, end)]:
            return rows[first:end].view(1, -1, *cache.shape[2:])
    return rows.index_select(0, chunks.flatten()).view(len(chunks), -1, *cache.shape[2:])

"""What layers keep of the tokens that they have seen: attention keeps keys and values.

A layer with a method `cache_spec()` gets its part of the engine's memory as `layer.cache`. The ModelRunner allocates
groups of layers with the same spec. That is a `PagedKV` (layers/attention.py) or a `StateSpec` (layers/state.py), with:

- `of_states`: whether it is of one state for a sequence, and not of blocks of tokens
- `make(parts, config)`: the `layer.cache` that has these parts of each tensor
- `tensors(num_layers, num_blocks, config)`: what all layers of the group have, on the meta device. Dimension 1 is the
  layers, dimension 2 the blocks or the states.

| what happens to a sequence | keys and values in blocks | a state (engine/state_blocks.py) |
| --- | --- | --- |
| prefix hit | it shares the blocks that are found | up to a snapshot, which its first chunk reads |
| fork | it shares full blocks, and copies the last one | it copies the state |
| preemption | its blocks are freed; the full ones can be found again | its state is lost; a snapshot can be found |
| rollback of drafts | its length shrinks, and slots are written again | none: drafts are refused |
"""

from math import gcd

import torch


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

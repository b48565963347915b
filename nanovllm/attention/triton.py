"""Attention by this package's Triton kernels."""

import os

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend


class TritonBackend(AttentionBackend):
    """Calls the paged kernels in `kernels/attention/`, which the constructor imports."""

    package, install = "triton", "pip install triton"
    kv_cache_dtypes = ("auto", "fp8")
    captures_chunks = True

    def __init__(self):
        from nanovllm.kernels import ops

        self.ops = ops
        self.tile_sizes: dict[tuple[int, int], int] = {}  # queries per tile, by group and head_dim

    @staticmethod
    def devices():
        return ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)

    @staticmethod
    def supports(spec):
        return True

    def attend(self, q, cache, context):
        q = q.contiguous()  # plain layers may pass a strided q
        out, n = torch.empty_like(q), context.num_decode_rows
        lengths, tables = context.context_lens, context.block_tables
        if context.is_prefill:
            size = self.tile_sizes[q.shape[1] // cache.k.shape[2], q.shape[2]]
            starts, tiles = context.cu_seqlens_q, context.backend_arrays[f"query_tiles_{size}"]
            self.ops.prefill_attention(q, cache, starts, lengths, tables, tiles, out)
        if n:
            args = q[:n], cache, lengths[:n], tables[:n], context.max_context_len
            others = dict(num_seqs=context.num_decode_rows_on_device, tokens_per_row=context.tokens_per_row)
            self.ops.decode_attention(*args, out=out[:n], **others)
        return out

    def set_head_shape(self, group, head_dim, dtype):
        self.tile_sizes[group, head_dim] = self.ops.query_tile_size(group, head_dim, dtype)

    def prepare_chunks(self, chunks, first_row):
        sizes = {*self.tile_sizes.values()}
        return {f"query_tiles_{size}": query_tiles(chunks, first_row, size) for size in sizes}

    def array_shapes(self, num_tokens, num_chunks):
        sizes = {*self.tile_sizes.values()}
        return tuple((f"query_tiles_{size}", (num_tokens // size + num_chunks, 2)) for size in sizes)


def query_tiles(chunks: list[tuple[int, int]], first_row: int, size: int) -> np.ndarray:
    """Return an int32 array [N, 2] with one tile for each program of the prefill kernel.

    A tile is a pair: the chunk's row in the batch, and the index of the tile's first token within the chunk. `chunks`
    contains the positions (start, end) of each chunk in its sequence. A tile covers at most `size` tokens. Tiles are
    sorted by descending number of keys.
    """
    starts, ends = np.array(chunks, np.int64).T
    counts = -((starts - ends) // size)
    rows = np.repeat(np.arange(len(chunks)), counts)
    tokens = size * (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows])
    return np.stack((first_row + rows, tokens), 1)[np.argsort(-(starts[rows] + tokens), kind="stable")]

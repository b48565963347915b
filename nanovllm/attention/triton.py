"""Attention by our own kernels, which are imported when the backend is constructed."""

import os

import torch

from nanovllm.layers.attention_backends import AttentionBackend


class TritonBackend(AttentionBackend):
    """Our own paged kernels."""

    package, install = "triton", "pip install triton"
    block_multiple = 16
    kv_cache_dtypes = ("auto", "fp8")
    captures_chunks = True

    def __init__(self):
        from nanovllm.kernels import ops

        self.ops = ops

    @staticmethod
    def runs_on_cpu():
        return os.environ.get("TRITON_INTERPRET") == "1"

    def attend(self, q, cache, context):
        q = q.contiguous()  # as it is after our kernels, but not after plain PyTorch
        out, n = torch.empty_like(q), context.num_decodes
        lengths, tables = context.context_lens, context.block_tables
        if context.has_chunks:
            starts, tiles = context.cu_seqlens_q, context.query_tiles
            self.ops.prefill_attention(q, cache.k, cache.v, starts, lengths, tables, tiles, out, cache.scales)
        if n:
            args = q[:n], cache.k, cache.v, lengths[:n], tables[:n], context.max_context_len
            count = context.num_decodes_on_device
            self.ops.decode_attention(*args, num_seqs=count, out=out[:n], scales=cache.scales)
        return out

    def query_tile_size(self, group, head_dim, dtype):
        return self.ops.query_tile_size(group, head_dim, dtype)

    def attend_qkv(self, qkv, qk_norm_rope, cache, context):
        """Few sequences that decode are one kernel."""
        is_decode = not context.has_chunks and context.tokens_per_row == 1  # drafts attend to keys of the same step
        if not is_decode or not self.ops.fuses_qk_norm_rope(len(qkv), cache.k.shape[2], qkv.device):
            return super().attend_qkv(qkv, qk_norm_rope, cache, context)
        return self.ops.decode_attention_of_qkv(
            qkv,
            *qk_norm_rope,
            context.slot_mapping,
            cache.k,
            cache.v,
            context.context_lens,
            context.block_tables,
            context.max_context_len,
            scales=cache.scales,
        )

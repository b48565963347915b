"""Attention by the flash-attn package."""

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend


class FlashBackend(AttentionBackend):
    """Calls the flash-attn package (FlashAttention-2, arXiv:2307.08691), which `__init__` imports."""

    package, install = "flash_attn", "pip install 'nano-vllm[flash]'"
    block_multiple = 256

    def __init__(self):
        import flash_attn

        self.flash_attn = flash_attn

    @staticmethod
    def devices():
        return ("cuda",)

    def attend(self, q, cache, context):
        n = context.num_decode_rows
        if not context.is_prefill:
            return self._decode(q, cache, context)
        out = self._prefill(q, cache, context)
        if n:
            out[:n] = self._decode(q[:n], cache, context)
        return out

    def _prefill(self, q, cache, context):
        """Compute attention for the prefill chunks. The output has a row for every token; decode rows are undefined."""
        n = context.num_decode_rows
        if "cu_seqlens_k" not in context.plans:
            context.plans["cu_seqlens_k"] = F.pad(context.context_lens[n:].cumsum(0, dtype=torch.int32), (1, 0))
        return self.flash_attn.flash_attn_varlen_func(
            q,
            cache.k,
            cache.v,
            context.cu_seqlens_q[n:],
            context.plans["cu_seqlens_k"],
            context.max_seqlen_q,
            context.max_context_len,
            block_table=context.block_tables[n:],
            causal=True,
            window_size=_window_size(cache),
            softmax_scale=cache.scale,
        )

    def _decode(self, q, cache, context):
        n = context.num_decode_rows
        return self.flash_attn.flash_attn_with_kvcache(
            q.unsqueeze(1),
            cache.k,
            cache.v,
            cache_seqlens=context.context_lens[:n],
            block_table=context.block_tables[:n],
            causal=True,
            window_size=_window_size(cache),
            softmax_scale=cache.scale,
        ).squeeze(1)


def _window_size(cache) -> tuple[int, int]:
    """Return how many tokens a query sees before and after its own token. -1 means no limit."""
    return (-1, -1) if cache.window is None else (cache.window - 1, 0)

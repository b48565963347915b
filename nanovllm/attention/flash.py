"""Attention by the flash-attn package."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend
from nanovllm.cache.kv_cache import AttentionSpec


class FlashBackend(AttentionBackend):
    """Calls the package flash-attn, which implements FlashAttention-2 (arXiv:2307.08691)."""

    package, install = "flash_attn", "pip install 'nano-vllm[flash]'"
    block_multiple = 256

    def __init__(self):
        import flash_attn

        self.flash_attn = flash_attn

    @staticmethod
    def devices():
        return ("cuda",)

    @staticmethod
    def supports(spec):
        return spec.sinks is None and spec.head_dim <= 256

    def attend(self, q, cache, context):
        n = context.num_decode_rows
        if not context.is_prefill:
            return self._decode(q, cache, context)
        out = self._prefill(q, cache, context)
        if n:
            out[:n] = self._decode(q[:n], cache, context)
        return out

    def _prefill(self, q, cache, context):
        """Compute attention for the prefill chunks. The output has the shape of q.

        The decode rows of the output are undefined.
        """
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
            **_options(cache.spec),
        )

    def _decode(self, q, cache, context):
        n = context.num_decode_rows
        return self.flash_attn.flash_attn_with_kvcache(
            q.unsqueeze(1),
            cache.k,
            cache.v,
            cache_seqlens=context.context_lens[:n],
            block_table=context.block_tables[:n],
            **_options(cache.spec),
        ).squeeze(1)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    # `window_size`: how many tokens a query sees before and after its own token; -1 means no limit
    window_size = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    return dict(causal=True, window_size=window_size, softmax_scale=spec.scale, softcap=spec.soft_cap or 0.0)

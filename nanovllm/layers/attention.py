"""Attention over the paged cache, from the qkv product to the input of the output projection: the layer, the cache
that it keeps, what a backend is that computes it, and the one of plain PyTorch, for any device.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.layers.rotary_embedding import QKNormRope, norm_rope
from nanovllm.utils.context import Context, get_context

SPAN_SIZE = 16  # tokens that are gathered as one row; divides every `kvcache_block_size`


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
        """What the caches of some layers consist of, on the meta device: see layers/state.py.

        shape is (2, layers, blocks, block_size, kv_heads, head_dim), that of the first tensor.
        """
        return (torch.empty(shape, dtype=dtype, device="meta"),)

    def store_kvcache(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim] to slots [T], which count tokens: none may be -1."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, spans: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, L, kv_heads, head_dim] of the spans [B, L / SPAN_SIZE] int32, in the model's dtype."""
        return gather_spans(self.k, spans), gather_spans(self.v, spans)


def gather_spans(cache: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """-> [B, L, kv_heads, head_dim]; on a CPU a view, if these are the spans of one sequence and follow each other."""
    rows = cache.view(-1, SPAN_SIZE * cache.shape[2] * cache.shape[3])
    if len(spans) == 1 and cache.is_cpu:
        ids = spans[0].tolist()
        if ids == [*range(ids[0], ids[-1] + 1)]:
            return rows[ids[0] : ids[-1] + 1].view(1, -1, *cache.shape[2:])
    return rows.index_select(0, spans.flatten()).view(len(spans), -1, *cache.shape[2:])


class PagedKV(NamedTuple):
    """The spec of attention: a key and a value of each token and head, in blocks that a sequence's table lists.

    layers/state.py says what a spec is, and lists the others.
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

    def attend_qkv(self, x, qkv_proj, qk_norm_rope: QKNormRope, cache: KVCache, context: Context) -> torch.Tensor:
        """The qkv product, norm and rope of queries and keys, the store of keys and values, and `attend`.

        `qkv_proj(x)` is [T, (heads + 2 kv_heads) * head_dim]; the result is [T, heads, head_dim].
        """
        qkv = qkv_proj(x).unflatten(-1, (-1, cache.k.shape[3]))
        return self.attend(norm_rope_and_store(qkv, qk_norm_rope, context.slot_mapping, cache), cache, context)

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Each of a step's queries against the keys of its sequence up to its own -> [T, heads, head_dim].

        With `cache.window`, against the last so many of them. The rows of decodes come first. Where a sequence has no
        keys, which is padding, the result may be any.
        """
        raise NotImplementedError


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, with its optional q and k norm, rotary embedding and cache."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend, window: int | None = None
    ):
        """The numbers of heads are those of this rank; `window` is how many tokens one attends to, itself included."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.backend = backend
        self.cache = KVCache(torch.empty(2, 0))

    def cache_spec(self) -> PagedKV:
        return PagedKV(self.num_kv_heads, self.head_dim, self.window)

    def forward(self, x: Any, qk_norm_rope: QKNormRope, qkv_proj: Callable = lambda qkv: qkv) -> torch.Tensor:
        """Attention of the qkv product [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim].

        The product is x itself, or what the linear layer `qkv_proj` makes of the NormInput x.
        """
        return self.backend.attend_qkv(x, qkv_proj, qk_norm_rope, self.cache, get_context()).flatten(1)


def make_backend(name: str) -> AttentionBackend:
    """The backend of a resolved setting `attention_backend`."""
    if name == "sdpa":
        return SDPABackend()
    from nanovllm.attention import backend_class  # imported lazily: a CPU needs none of it

    return backend_class(name)()


class _Group(NamedTuple):
    """What is computed in one call: sequences with one query each, or one sequence with several.

    L, the number of their keys, is padded to a multiple of SPAN_SIZE: CPU kernels are compiled for fewer shapes.
    """

    rows: slice  # of q
    spans: torch.Tensor  # [sequences, L / SPAN_SIZE] int32: the spans of the cache that hold their keys and values
    mask: torch.Tensor | None  # added to the scores; None: a single query sees all keys, a chunk's those up to its own
    is_prompt: bool


class SDPABackend(AttentionBackend):
    """Gathers each sequence's keys and values out of the cache."""

    uses_cuda_graphs = False

    def attend(self, q, cache, context):
        if cache.window not in context.plans:  # by the first layer of a step, for all with the same window
            context.plans[cache.window] = [*_plan(context, cache.window, cache.k.shape[1], q.dtype)]
        q = q.unflatten(1, (cache.k.shape[2], -1))  # [T, kv_heads, group, head_dim]
        outputs = []
        for group in context.plans[cache.window]:
            attend = _attend_chunk if group.is_prompt else _attend_one_token
            outputs.append(attend(q[group.rows], *cache.gather(group.spans, q.dtype), group.mask))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).flatten(1, 2)


def _attend_one_token(q, k, v, mask) -> torch.Tensor:
    """One query for each sequence: q [n, kv_heads, group, head_dim], k and v [n, L, kv_heads, head_dim] -> as q."""
    # Heads of the same keys are rows of one product, but for pairs of them in bfloat16 on a CPU with AMX: it takes 0.4
    # to 0.7 of the time to compute these one by one, and without AMX 1.6 to 8 times as long.
    singly = q.shape[2] == 2 and q.is_cpu and q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    queries = q.flatten(1, 2).unsqueeze(2) if singly else q
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [n, kv_heads, L, head_dim]
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=singly).reshape(q.shape)


def _attend_chunk(q, k, v, mask) -> torch.Tensor:
    """The M queries of one sequence: q [M, kv_heads, group, head_dim], k and v [1, L, kv_heads, head_dim] -> as q.

    Without a mask, query i sees the keys up to key i.
    """
    num_queries, _, group, _ = q.shape
    queries = q.permute(1, 2, 0, 3)  # [kv_heads, group, M, head_dim]
    # key-value heads are the batch dimension, and `expand` repeats them for the query heads without a copy
    k, v = (x.permute(2, 0, 1, 3).expand(-1, group, -1, -1) for x in (k, v))  # [kv_heads, group, L, head_dim]
    if mask is None:  # padding at the end is invisible to the queries of the prompt
        queries = F.pad(queries, (0, 0, 0, k.shape[2] - num_queries))
    attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, is_causal=mask is None)
    return attended[:, :, :num_queries].permute(2, 0, 1, 3)


def _plan(context: Context, window: int | None, block_size: int, dtype: torch.dtype) -> Iterator[_Group]:
    """The groups of a step, in the order of its rows."""
    lengths, starts = context.context_lens.tolist(), []
    num_single = len(lengths)
    if context.has_chunks and context.max_seqlen_q > 1:  # beams compute one token each
        num_single, starts = context.num_decodes, context.cu_seqlens_q.tolist()

    # Adjacent sequences of similar length, which the scheduler sorts, longest first. Padding to the longest of a group
    # adds at most a seventh and 18 tokens to each: larger groups would gather more padding, smaller ones need more
    # calls.
    begin = 0
    for end in range(1, num_single + 1):
        longest = _padded(lengths[begin])  # drafts attend to a few more
        if end < num_single and longest * 7 // 8 - 16 <= lengths[end] <= longest:
            continue
        bounds, mask = context.context_lens[begin:end, None, None, None], None
        if min(lengths[begin:end]) < longest or (window or longest) < longest:
            mask = _mask(bounds, longest, window, dtype)
        yield _Group(slice(begin, end), spans_of(context.block_tables[begin:end], longest, block_size), mask, False)
        begin = end

    for i in range(num_single, len(lengths)):
        length, rows = lengths[i], slice(starts[i], starts[i + 1])
        mask, num_new = None, rows.stop - rows.start
        if num_new < length or (window or length) < length:
            bounds = torch.arange(length - num_new + 1, length + 1, device=context.context_lens.device).unsqueeze(1)
            mask = _mask(bounds, _padded(length), window, dtype)
        yield _Group(rows, spans_of(context.block_tables[i : i + 1], length, block_size), mask, True)


def _padded(length: int) -> int:
    return -(-length // SPAN_SIZE) * SPAN_SIZE


def _mask(bounds: torch.Tensor, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """-> [..., num_keys]: 0 for the keys that a query sees, the last `window` of those before its bound [..., 1]."""
    positions = torch.arange(num_keys, device=bounds.device)
    visible = positions < bounds
    if window is not None:
        visible &= positions >= bounds - window
    return torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device).masked_fill_(visible, 0)


def spans_of(block_tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """The spans [B, L / SPAN_SIZE] int32 that hold the first `length` tokens behind each table."""
    per_block = block_size // SPAN_SIZE
    offsets = torch.arange(per_block, device=block_tables.device, dtype=torch.int32)
    tables = block_tables[:, : -(-length // block_size), None]
    return (tables * per_block + offsets).flatten(1)[:, : -(-length // SPAN_SIZE)]

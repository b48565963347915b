"""How attention over the paged cache is computed: what a backend is, and the one of plain PyTorch."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.kernels import operation
from nanovllm.layers.kv_cache import KVCache, chunk_size
from nanovllm.layers.rotary_embedding import QKNormRope, norm_rope
from nanovllm.utils.context import Context


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
    block_multiple = 16  # what `kvcache_block_size` must be a multiple of
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # the formats of the cache that it reads
    uses_cuda_graphs = True  # decode never reads a result on the host
    captures_chunks = False  # nor does a step with chunks, which reads their number and lengths on the device

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """The types of the devices on which it runs; None: all that run PyTorch."""
        return None

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Called for each attention layer, before any step: `group` query heads share a key-value head."""

    def prepare_chunks(self, chunk_lens: list[int], first_row: int) -> dict[str, np.ndarray]:
        """int32 arrays for `Context.backend_arrays`, of a step whose rows from `first_row` on are chunks of prompts."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and largest dimensions of these arrays in a CUDA graph, where -1 is padding."""
        return ()

    def attend_qkv(self, qkv, qk_norm_rope: QKNormRope, cache: KVCache, context: Context) -> torch.Tensor:
        """Norm and rope of queries and keys, the store of keys and values, and `attend`, from the qkv product.

        qkv [T, heads + 2 kv_heads, head_dim] -> [T, heads, head_dim].
        """
        return self.attend(norm_rope_and_store(qkv, qk_norm_rope, context.slot_mapping, cache), cache, context)

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Each of a step's queries against the keys of its sequence up to its own -> [T, heads, head_dim].

        The rows of decodes come first. Where a sequence has no keys, which is padding, the result may be any.
        """
        raise NotImplementedError


class DividedBackend(AttentionBackend):
    """Computes `attend` in two calls: `decode`, for the first rows, and `prefill`, which leaves any values there."""

    def attend(self, q, cache, context):
        n = context.num_decodes
        if not context.has_chunks:
            return self.decode(q, cache, context)
        out = self.prefill(q, cache, context)
        if n:
            out[:n] = self.decode(q[:n], cache, context)
        return out


def make_backend(name: str) -> AttentionBackend:
    """The backend of a resolved setting `attention_backend`."""
    if name == "sdpa":
        return SDPABackend()
    from nanovllm.attention import backend_class  # imported lazily: a CPU needs none of it

    return backend_class(name)()


class SDPABackend(DividedBackend):
    """PyTorch alone: gathers each sequence's keys and values out of the cache, for CPUs and GPUs without Triton."""

    uses_cuda_graphs = False

    def prefill(self, q, cache, context):
        out, n = torch.empty_like(q), context.num_decodes
        if context.max_seqlen_q == 1:  # beams compute one token each
            out[n:] = _attend_one_token(q[n:], cache, _plan_decode(context, slice(n, None), cache, q.dtype))
            return out
        for rows, chunks, mask in _plan_prefill(context, slice(n, None), cache, q.dtype):
            # key-value heads are the batch dimension, and `expand` repeats them for the query heads without a copy
            queries = q[rows].unflatten(1, (cache.k.shape[2], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, M, head_dim]
            k, v = (x.permute(2, 0, 1, 3) for x in cache.gather(chunks, q.dtype))
            k, v = (x.expand(-1, queries.shape[1], -1, -1) for x in (k, v))  # [kv_heads, group, L, head_dim]
            num_rows = queries.shape[2]
            if mask is None:  # padding at the end is invisible to the queries of the prompt
                queries = F.pad(queries, (0, 0, 0, k.shape[2] - num_rows))
            attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, is_causal=mask is None)
            out[rows] = attended[:, :, :num_rows].permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def decode(self, q, cache, context):
        return _attend_one_token(q, cache, _plan_decode(context, slice(0, context.num_decodes), cache, q.dtype))


class _Group(NamedTuple):
    """Sequences that are computed in one call. Lengths are padded to a multiple of the chunk size."""

    rows: slice  # of q
    chunks: torch.Tensor  # [sequences, L / chunk size] int32: the chunks that hold their keys and values
    mask: torch.Tensor | None  # added to the scores; None: causal in a prefill, and no mask in a decode


def _once_a_step(plan: Callable[[Context, slice, KVCache, torch.dtype], Iterator[_Group]]):
    """A decorator: the first layer of a step makes the plan, and others with the same window reuse it."""

    def reuse(context: Context, seqs: slice, cache: KVCache, dtype: torch.dtype) -> list[_Group]:
        key = plan, seqs.start, cache.window
        if key not in context.plans:
            context.plans[key] = list(plan(context, seqs, cache, dtype))
        return context.plans[key]

    return reuse


@_once_a_step
def _plan_prefill(context: Context, seqs: slice, cache: KVCache, dtype: torch.dtype) -> Iterator[_Group]:
    """A group for each chunk."""
    starts, lengths = context.cu_seqlens_q.tolist(), context.context_lens.tolist()
    for i in range(seqs.start, len(lengths)):
        length, num_new = lengths[i], starts[i + 1] - starts[i]
        chunks, padded_length = _chunks(context.block_tables[i : i + 1], length, cache.k.shape[1])
        mask, window = None, cache.window or length
        if num_new < length or window < length:  # the last query sees all keys of its window but the padding
            visible = torch.ones(num_new, padded_length, dtype=torch.bool, device=chunks.device)
            mask = _additive(visible.tril_(length - num_new).triu_(length - num_new - window + 1), dtype)
        yield _Group(slice(starts[i], starts[i + 1]), chunks, mask)


@_once_a_step
def _plan_decode(context: Context, seqs: slice, cache: KVCache, dtype: torch.dtype) -> Iterator[_Group]:
    """Groups of adjacent sequences of similar length, of those with one query: the scheduler sorts them, longest first.

    Padding to the longest of a group adds at most a seventh and 18 tokens to each sequence: larger groups would gather
    more padding, and smaller ones need more calls.
    """
    context_lens, block_tables = context.context_lens[seqs], context.block_tables[seqs]
    lengths, block_size = context_lens.tolist(), cache.k.shape[1]
    size = chunk_size(block_size)
    begin = 0
    for end in range(1, len(lengths) + 1):
        longest = -(-lengths[begin] // size) * size  # drafts attend to a few more
        if end < len(lengths) and longest * 7 // 8 - 16 <= lengths[end] <= longest:
            continue
        chunks, padded_length = _chunks(block_tables[begin:end], longest, block_size)
        mask, window = None, cache.window or padded_length
        if min(lengths[begin:end]) < padded_length or window < padded_length:
            bounds, positions = (
                context_lens[begin:end, None, None, None],
                torch.arange(padded_length, device=chunks.device),
            )
            visible = positions < bounds  # [n, 1, 1, L]
            if window < padded_length:
                visible &= positions >= bounds - window
            mask = _additive(visible, dtype)
        yield _Group(slice(begin, end), chunks, mask)
        begin = end


def _attend_one_token(q, cache: KVCache, plan: list[_Group]) -> torch.Tensor:
    """One query for each sequence, q [B, heads, head_dim] -> the same shape."""
    outputs = []
    # Heads of the same keys are rows of one product, but for pairs of them in bfloat16 on a CPU with AMX: it takes 0.4
    # to 0.7 of the time to compute these one by one, and without AMX 1.6 to 8 times as long.
    group, kv_heads = q.shape[1] // cache.k.shape[2], cache.k.shape[2]
    singly = group == 2 and q.is_cpu and q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    for rows, chunks, mask in plan:
        queries = q[rows].unsqueeze(2) if singly else q[rows].unflatten(1, (kv_heads, group))
        k, v = (x.transpose(1, 2) for x in cache.gather(chunks, q.dtype))  # [n, kv_heads, L, head_dim]
        attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=singly)
        outputs.append(attended.flatten(1, 2))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _chunks(block_tables: torch.Tensor, length: int, block_size: int) -> tuple[torch.Tensor, int]:
    """The chunks [B, L / chunk size] that hold the first `length` tokens behind each table, and L."""
    size = chunk_size(block_size)
    num_chunks, per_block = -(-length // size), block_size // size
    offsets = torch.arange(per_block, device=block_tables.device, dtype=torch.int32)
    tables = block_tables[:, : -(-length // block_size), None]
    return (tables * per_block + offsets).flatten(1)[:, :num_chunks], num_chunks * size

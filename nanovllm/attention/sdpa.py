"""Attention in plain PyTorch, for any device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend
from nanovllm.cache.kv_cache import SPAN_SIZE
from nanovllm.kernels import operation
from nanovllm.utils.context import Context


class _Group(NamedTuple):
    """The rows of one attention call: several sequences with one query each, or one sequence with several queries.

    The number of keys (L) is a multiple of SPAN_SIZE, so CPU kernels are compiled for fewer shapes.
    """

    rows: slice  # of q
    spans: torch.Tensor  # [sequences, L / SPAN_SIZE] int32: the cache spans that contain the keys and values
    mask: torch.Tensor | None  # added to the scores; None hides no key, except that a chunk is causal
    is_prompt: bool


class SDPABackend(AttentionBackend):
    """Gathers each sequence's keys and values from the cache, then calls `scaled_dot_product_attention`."""

    uses_cuda_graphs = False

    @staticmethod
    def supports(spec):
        return True

    def attend(self, q, cache, context):
        spec = cache.spec
        if spec.window not in context.plans:  # the first layer of a step plans for all layers with the same window
            context.plans[spec.window] = [*_plan(context, spec.window, cache.k.shape[1], q.dtype)]
        q = q.unflatten(1, (cache.k.shape[2], -1))  # [T, kv_heads, group, head_dim]
        outputs = []
        for group in context.plans[spec.window]:
            attend = _attend_chunk if group.is_prompt else attend_one_token
            outputs.append(attend(q[group.rows], *cache.gather(group.spans, q.dtype), group.mask, spec))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).flatten(1, 2)


@operation
def attend_one_token(q, k, v, mask, spec) -> torch.Tensor:
    """Compute attention for one query per sequence. Query heads that share keys are the rows of one matmul.

    q and the result are [n, kv_heads, group, head_dim]. k and v are [n, L, kv_heads, head_dim].
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [n, kv_heads, L, head_dim]
    if spec.is_special:
        mask = None if mask is None else mask.unsqueeze(1)
        return _attend_in_steps(q.unsqueeze(3), k.unsqueeze(2), v.unsqueeze(2), mask, spec).squeeze(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)


def _attend_chunk(q, k, v, mask, spec) -> torch.Tensor:
    """Compute attention for M queries of one sequence. Without a mask, query `i` sees keys 0 to `i`.

    q and the result are [M, kv_heads, group, head_dim]. k and v are [1, L, kv_heads, head_dim].
    """
    num_queries, _, group, _ = q.shape
    queries = q.permute(1, 2, 0, 3)  # [kv_heads, group, M, head_dim]
    # key-value heads are the batch; `expand` repeats them for the query heads without a copy
    k, v = (x.permute(2, 0, 1, 3).expand(-1, group, -1, -1) for x in (k, v))  # [kv_heads, group, L, head_dim]
    if mask is None:  # padding at the end is invisible to the queries of the prompt
        queries = F.pad(queries, (0, 0, 0, k.shape[2] - num_queries))
    if spec.is_special:
        attended = _attend_in_steps(queries, k, v, mask, spec)
    else:
        options = dict(attn_mask=mask, is_causal=mask is None, scale=spec.scale)
        attended = F.scaled_dot_product_attention(queries, k, v, **options)
    return attended[:, :, :num_queries].permute(2, 0, 1, 3)


def _attend_in_steps(q, k, v, mask, spec) -> torch.Tensor:
    """Compute attention with a soft cap or sinks, for which PyTorch has no function.

    q is [..., kv_heads, group, M, head_dim]. k and v are [..., kv_heads, 1 or group, L, head_dim]. Without a mask,
    query `i` sees keys 0 to `i`. A single query (M = 1) sees all keys.
    """
    scores = (q @ k.transpose(-1, -2)).float() * (spec.scale or q.shape[-1] ** -0.5)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if mask is None and q.shape[-2] > 1:
        mask = torch.full_like(scores[0, 0], -torch.inf).triu(1)
    scores = scores if mask is None else scores + mask
    if spec.sinks is not None:  # like the score of an additional key whose value is zero
        sinks = spec.sinks.float().view(*q.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _plan(context: Context, window: int | None, block_size: int, dtype: torch.dtype) -> Iterator[_Group]:
    """Yield the groups (`_Group`) of a step, in the order of the step's rows."""
    lengths, starts = context.context_lens.tolist(), []
    num_single = len(lengths)
    if context.is_prefill and context.max_seqlen_q > 1:  # chunks of one token are like decodes
        num_single, starts = context.num_decode_rows, context.cu_seqlens_q.tolist()

    # a group has adjacent sequences of similar length (the longest are first): larger groups would gather more padding,
    # and smaller groups would need more calls
    begin = 0
    for end in range(1, num_single + 1):
        longest = _padded(lengths[begin])  # a draft's row attends to more keys than the row before it
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
    """Return a mask [..., num_keys]. The `window` keys just before `bounds` [..., 1] get 0, and other keys get -inf."""
    positions = torch.arange(num_keys, device=bounds.device)
    visible = positions < bounds
    if window is not None:
        visible &= positions >= bounds - window
    return torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device).masked_fill_(visible, 0)


def spans_of(block_tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Return the spans of each sequence's first `length` tokens: int32 [B, L / SPAN_SIZE]. `block_tables` is [B, W]."""
    per_block = block_size // SPAN_SIZE
    offsets = torch.arange(per_block, device=block_tables.device, dtype=torch.int32)
    tables = block_tables[:, : -(-length // block_size), None]
    return (tables * per_block + offsets).flatten(1)[:, : -(-length // SPAN_SIZE)]

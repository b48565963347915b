"""Computes attention that processes the keys of each query in the order of the keys' positions."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.sdpa import spans_of
from nanovllm.cache.kv_cache import AttentionSpec
from nanovllm.utils.context import Context

QUERIES = 4  # per block; few, because a decode step uses only one of them
KEYS = 128  # per block; block j starts at position j * KEYS


class _Sequence(NamedTuple):
    """Holds the attention plan of a sequence, which all layers with the same window share."""

    spans: torch.Tensor  # the result of `spans_of`
    queries: list[tuple[slice, torch.Tensor]]  # by block: rows of q, mask of hidden keys [key blocks, QUERIES, 1, KEYS]


class InvariantBackend(AttentionBackend):
    """A backend that multiplies blocks of a sequence's queries by blocks of the sequence's keys, in float32.

    All matmuls have the same shape, and results are added in the order of positions. The maximum of the scores of all
    blocks is computed before any exponential. If no key of a block is visible to a query, the block adds zeros.
    """

    uses_cuda_graphs = False

    @staticmethod
    def supports(spec):
        return True

    def attend(self, q, cache, context):
        window = cache.spec.window
        if window not in context.plans:  # computed by the first layer of a step
            context.plans[window] = [*_plan(context, window, cache.k.shape[1])]
        out = torch.empty_like(q)
        for spans, queries in context.plans[window]:
            k, v = (_blocks(x[0]) for x in cache.gather(spans, q.dtype))
            for rows, hidden in queries:
                out[rows] = _attend(q[rows], k, v, hidden, cache.spec)
        return out


def _plan(context: Context, window: int | None, block_size: int) -> Iterator[_Sequence]:
    lengths = context.context_lens.tolist()
    starts = context.cu_seqlens_q.tolist() if context.cu_seqlens_q is not None else range(len(lengths) + 1)
    for i, length in enumerate(lengths):
        queries = []
        for begin in range(starts[i], starts[i + 1], QUERIES):
            end = min(begin + QUERIES, starts[i + 1])
            last = length - 1 - (starts[i + 1] - end)  # position of the last query; padding repeats it
            positions = torch.arange(last - (end - begin) + 1, last - (end - begin) + 1 + QUERIES).clamp_(max=last)
            positions, keys = positions[:, None, None], torch.arange((last // KEYS + 1) * KEYS)
            hidden = keys > positions  # [QUERIES, 1, keys]
            if window is not None:
                hidden |= keys <= positions - window
            queries.append((slice(begin, end), hidden.unflatten(2, (-1, KEYS)).movedim(2, 0)))
        yield _Sequence(spans_of(context.block_tables[i : i + 1], length, block_size), queries)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Divide x [L, kv_heads, head_dim] into float32 blocks [blocks, kv_heads, KEYS, head_dim], padded with zeros."""
    x = F.pad(x.float(), (0, 0, 0, 0, 0, -len(x) % KEYS))
    return x.unflatten(0, (-1, KEYS)).transpose(1, 2).contiguous()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Return the attention of at most QUERIES queries over blocks of keys and values. The result has the shape of q."""
    num_queries = len(q)
    x = F.pad(q.float(), (0, 0, 0, 0, 0, QUERIES - num_queries)) * (spec.scale or q.shape[2] ** -0.5)
    x = x.unflatten(1, (k.shape[1], -1)).transpose(0, 1)  # [kv_heads, QUERIES, group, head_dim]
    rows = x.flatten(1, 2).contiguous()
    scores = [(rows @ keys.transpose(1, 2)).view(*x.shape[:3], KEYS) for keys in k[: len(hidden)]]
    for block, is_hidden in zip(scores, hidden):
        if spec.soft_cap is not None:
            block.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        block.masked_fill_(is_hidden, -torch.inf)
    largest = torch.stack([block.amax(3, keepdim=True) for block in scores]).amax(0)
    total = weights_sum = torch.zeros(())
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(len(x), 1, -1, 1)
        largest = largest.maximum(sinks)
        weights_sum = (sinks - largest).exp_()
    for block, values in zip(scores, v):
        weights = block.sub_(largest).exp_()
        total = total + (weights.flatten(1, 2) @ values)
        weights_sum = weights_sum + weights.sum(3, keepdim=True)
    attended = total.view(x.shape) / weights_sum  # [kv_heads, QUERIES, group, head_dim]
    return attended.transpose(0, 1)[:num_queries].reshape(q.shape).to(q.dtype)

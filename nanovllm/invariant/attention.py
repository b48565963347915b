"""Attention whose sums have one order, by the positions of the keys, for each query."""

import torch

from nanovllm.invariant.ops import ROWS, padded
from nanovllm.layers.attention import AttentionBackend, spans_of

KEYS = 256  # of a block; block j has the keys of the positions from j * KEYS on


class InvariantBackend(AttentionBackend):
    """Multiplies blocks of ROWS queries of a sequence by blocks of KEYS keys, in float32.

    All calls have the same shapes. The exponentials are relative to the largest score of all blocks; the blocks are
    added up from the first position on. A block that a query does not see adds zeros to it.
    """

    uses_cuda_graphs = False

    def attend(self, q, cache, context):
        starts = context.cu_seqlens_q.tolist() if context.has_chunks else range(len(q) + 1)
        out = torch.empty_like(q)
        for i, length in enumerate(context.context_lens.tolist()):
            spans = spans_of(context.block_tables[i : i + 1], length, cache.k.shape[1])
            k, v = (_blocks(x[0]) for x in cache.gather(spans, q.dtype))
            for begin in range(starts[i], starts[i + 1], ROWS):
                rows = slice(begin, min(begin + ROWS, starts[i + 1]))
                position = length - (starts[i + 1] - begin)  # of the first query
                out[rows] = _attend(q[rows], k, v, position, cache.window)
        return out


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[L, kv_heads, head_dim] -> [blocks, kv_heads, KEYS, head_dim] float32, with zeros at the end."""
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -len(x) % KEYS))
    return x.unflatten(0, (-1, KEYS)).transpose(1, 2).contiguous()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None) -> torch.Tensor:
    """At most ROWS queries [n, heads, head_dim] of positions that begin with `position`, with the blocks -> as q."""
    num_queries, num_kv_heads, head_dim = len(q), k.shape[1], q.shape[2]
    x = padded(q.float()).unflatten(1, (num_kv_heads, -1)) * head_dim**-0.5  # [ROWS, kv_heads, group, head_dim]
    group = x.shape[2]
    x = x.transpose(0, 1).reshape(num_kv_heads, ROWS * group, head_dim)
    positions = torch.arange(position, position + ROWS).clamp_(max=position + num_queries - 1)
    positions = positions.repeat_interleave(group).unsqueeze(1)  # [ROWS * group, 1]
    scores = []
    for j in range((position + num_queries - 1) // KEYS + 1):
        keys = torch.arange(j * KEYS, (j + 1) * KEYS)
        is_hidden = keys > positions
        if window is not None:
            is_hidden |= keys <= positions - window
        scores.append((x @ k[j].transpose(1, 2)).masked_fill_(is_hidden, -torch.inf))
    largest = torch.stack([block.amax(-1, keepdim=True) for block in scores]).amax(0)
    total, weights_sum = torch.zeros_like(x), torch.zeros_like(largest)
    for block, values in zip(scores, v):
        weights = (block - largest).exp_()
        total += weights @ values
        weights_sum += weights.sum(-1, keepdim=True)
    attended = (total / weights_sum).unflatten(1, (ROWS, group)).transpose(0, 1)[:num_queries]
    return attended.reshape(q.shape).to(q.dtype)

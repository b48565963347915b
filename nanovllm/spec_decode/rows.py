"""Rows of several tokens: a sequence gets its next token and, of the drafts after it, those that are right.

`engine/request_tables.py` calls these where a step has such rows: k, `tokens_per_row`, is then more than 1. Kernels do
the same.
"""

from typing import Any

import torch

from nanovllm.engine.request_tables import RequestTables, arrays


def rows_of_drafts(k: int, req_indices: Any, num_reserved: Any, lengths: Any, last_token_ids: Any) -> tuple[Any, ...]:
    """The k rows of each of D sequences: request indices, `num_reserved`, lengths and token ids, all [D * k].

    Each row attends to one token more: the last token, then drafts. Rows past the sequence's `num_reserved` are copies
    of the last one.
    """
    (steps,) = arrays(torch.arange(k, device=getattr(num_reserved, "device", "cpu")))
    offsets = (steps - (steps - num_reserved[:, None] + 1).clip(0)).clip(0)  # [D, k]
    found = (x[:, None] + 0 * steps for x in (req_indices, num_reserved))
    token_ids = last_token_ids[req_indices[:, None], offsets].clip(0)  # -1: no draft
    return tuple(x.reshape(-1) for x in (*found, lengths[:, None] + offsets, token_ids))


def accept_drafts(
    req_indices: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, tables: RequestTables
) -> torch.Tensor:
    """How many of its sampled tokens [S * k] each sequence gets: counts [S] int32. See `accept`.

    A draft is right if it equals the token that was sampled in its place. Rows whose position is that of the row before
    them have none.
    """
    k = len(token_ids) // len(req_indices)
    req_indices, positions, tokens = arrays(req_indices, positions.reshape(-1, k), token_ids.reshape(-1, k))
    last_token_ids, num_tokens = arrays(*tables[:2])
    is_right = (last_token_ids[req_indices, 1:k] == tokens[:, :-1]) & (positions[:, 1:] > positions[:, :-1])
    counts = 1 + is_right.cumprod(1).sum(1)
    (rows,) = arrays(torch.arange(len(tokens), device=token_ids.device))
    last_token_ids[req_indices, 0] = tokens[rows, counts - 1]
    num_tokens[req_indices] = positions[:, 0] + 1 + counts
    return torch.as_tensor(counts).int()

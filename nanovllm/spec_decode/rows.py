"""Rows of several tokens: a sequence gets its next token and, of the drafts after it, those that are right.

`batches/request_tables.py` calls these where a step has such rows: k, `tokens_per_row`, is then more than 1. Kernels do
the same.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from nanovllm.batches.request_tables import RequestTables, arrays
from nanovllm.kernels import operation


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


class ChainShape(NamedTuple):
    """What a step's chains of drafts consist of; a constant of the kernel."""

    num_steps: int  # at most as many drafts
    width: int  # rows of a sequence in the first step; it has one in each other
    shift: int  # from the position of a row to that of its token
    block_size: int


@operation
def place_chains(
    req_indices: torch.Tensor,
    num_drafts: torch.Tensor,
    tables: RequestTables,
    num_computed: torch.Tensor,
    shape: ChainShape,
) -> tuple[torch.Tensor, ...]:
    """Where the drafter of D sequences computes its rows, and where it takes tokens and writes them.

    Of rows [R], those of one step after those of another, all int32 but for slots of tokens, int64:

    - positions: those of the tokens or, of a head, before them
    - context lengths; 0: padding
    - slots; -1: padding
    - slots of tokens

    And of a sequence's last row in each step [num_steps, D]:

    - position of its token, int32
    - slot where that is written, int64; -1: it is there already, or is padding

    First the rows that each sequence lacks, as if these were `width`: the others are copies of the last one. Then a row
    for each further draft, or a copy of the one before if there is none. `num_computed`, by request index, becomes that
    of all rows but those of drafts.
    """
    num_steps, width, shift, block_size = shape
    indices, steps = req_indices.long(), torch.arange(max(width, num_steps), device=req_indices.device)
    lengths, slots = tables.num_tokens[indices].long(), partial(slots_of, tables, block_size)
    starts = num_computed[indices].clamp(lengths - shift - width, lengths - shift - 1) + shift
    num_computed[indices] = lengths - shift
    first = (starts[:, None] + steps[:width]).minimum(lengths[:, None] - 1)  # [D, width] positions of tokens
    newest = lengths - 1 + steps[:num_steps, None].minimum(num_drafts - 1)  # [num_steps, D]
    of_rows = lambda x: torch.cat((x.repeat_interleave(width), x.repeat(num_steps - 1)))
    owners, is_real, is_new = of_rows(indices), of_rows(num_drafts > 0), steps[:num_steps, None] < num_drafts
    tokens = torch.cat((first.flatten(), newest[1:].flatten())) * is_real
    positions = (tokens - shift) * is_real
    rows = positions, (positions + 1) * is_real, slots(owners, positions).where(is_real, -1)
    newest_slots = slots(indices.expand_as(newest), newest * is_new).where(is_new, -1)
    return *(x.int() for x in rows), slots(owners, tokens), newest.int(), newest_slots


def slots_of(
    tables: RequestTables, block_size: int, req_indices: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The cache slots of positions of requests, all int64 and of one shape."""
    return tables.block_tables[req_indices, positions // block_size].long() * block_size + positions % block_size

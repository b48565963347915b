"""Handles steps that verify drafts. In a step with drafts, each sequence has k = `tokens_per_row` rows.

Each sequence gets its accepted drafts and one more token. On CUDA, kernels replace the functions in this module.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from nanovllm.batches.request_tables import RequestTables, arrays
from nanovllm.kernels import operation


def rows_of_drafts(k: int, req_indices: Any, num_reserved: Any, lengths: Any, last_token_ids: Any) -> tuple[Any, ...]:
    """Return request indices, `num_reserved`, lengths and token ids, each [D * k]: k rows for each of D sequences.

    The first row contains the sequence's last token. Each further row contains one draft. Row `num_reserved` and all
    later rows are copies of row `num_reserved - 1`.
    """
    (steps,) = arrays(torch.arange(k, device=getattr(num_reserved, "device", "cpu")))
    offsets = (steps - (steps - num_reserved[:, None] + 1).clip(0)).clip(0)  # [D, k]
    repeated = (x[:, None] + 0 * steps for x in (req_indices, num_reserved))
    token_ids = last_token_ids[req_indices[:, None], offsets].clip(0)  # -1: no draft
    return tuple(x.reshape(-1) for x in (*repeated, lengths[:, None] + offsets, token_ids))


def accept_drafts(
    req_indices: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, tables: RequestTables
) -> torch.Tensor:
    """Return how many sampled tokens each sequence gets, as [S] int32. The maximum is k.

    A draft is accepted if it and all earlier drafts equal the tokens sampled at their positions. A row at the same
    position as the previous row contains no draft. This function also stores each sequence's new length and last token
    in the tables.
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
    """The shape of the draft chains in a step. The shape is a compile-time constant of the kernel."""

    num_steps: int  # maximum drafts per sequence
    width: int  # rows of a sequence in the first step; each further step has one row
    shift: int  # the position of a row's token minus the position of the row
    block_size: int


@operation
def place_chains(
    req_indices: torch.Tensor,
    num_drafts: torch.Tensor,
    tables: RequestTables,
    num_computed: torch.Tensor,
    shape: ChainShape,
) -> tuple[torch.Tensor, ...]:
    """Return positions and cache slots for the rows that a drafter computes for D sequences.

    The first tensors describe all rows [R], ordered by step:

    - positions, int32: the positions of the tokens minus `shift`
    - context lengths, int32; 0 for padding
    - slots, int32; -1 for padding
    - slots of the tokens, int64

    The other tensors [num_steps, D] describe the last row of each sequence in each step:

    - the position of the row's token, int32
    - the slot to which the row's token is written, int64; -1 for padding, or if the token was written before

    In the first step, a sequence has `width` rows: the rows that it lacks, then copies of its last row. In each further
    step, a sequence has one row for another draft, or a copy of its previous row if no draft is left. The function sets
    `num_computed`, which is indexed by request, to the number of computed rows. Rows of drafts are not counted.
    """
    num_steps, width, shift, block_size = shape
    indices, steps = req_indices.long(), torch.arange(max(width, num_steps), device=req_indices.device)
    lengths, slots = tables.num_tokens[indices].long(), partial(slots_of, tables, block_size)
    starts = num_computed[indices].clamp(lengths - shift - width, lengths - shift - 1) + shift
    num_computed[indices] = lengths - shift
    first_tokens = (starts[:, None] + steps[:width]).minimum(lengths[:, None] - 1)  # [D, width] positions of tokens
    newest = lengths - 1 + steps[:num_steps, None].minimum(num_drafts - 1)  # [num_steps, D]
    of_rows = lambda x: torch.cat((x.repeat_interleave(width), x.repeat(num_steps - 1)))
    owners, is_real, is_new = of_rows(indices), of_rows(num_drafts > 0), steps[:num_steps, None] < num_drafts
    tokens = torch.cat((first_tokens.flatten(), newest[1:].flatten())) * is_real
    positions = (tokens - shift) * is_real
    rows = positions, (positions + 1) * is_real, slots(owners, positions).where(is_real, -1)
    newest_slots = slots(indices.expand_as(newest), newest * is_new).where(is_new, -1)
    return *(x.int() for x in rows), slots(owners, tokens), newest.int(), newest_slots


def slots_of(
    tables: RequestTables, block_size: int, req_indices: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Map positions of requests to cache slots.

    `req_indices`, `positions` and the result are int64 tensors of the same shape.
    """
    return tables.block_tables[req_indices, positions // block_size].long() * block_size + positions % block_size

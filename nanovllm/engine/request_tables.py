"""What the device knows of each request: the host learns the outcome of a step one step later, if at all.

A sequence that decodes may get several tokens in a step: the next one, and one for each draft that is right. So only
the device knows how long it is when the next step is queued, and works out where that step's tokens go.
"""

from typing import NamedTuple

import torch

from nanovllm.engine.batch import DeviceBatch
from nanovllm.engine.step_result import SamplerInput
from nanovllm.kernels import triton_ops


class RequestTables(NamedTuple):
    """int32, by request index. One more row, the last, is for padding: its parameters, zeros, mean greedy sampling."""

    last_token_ids: torch.Tensor  # [requests, tokens_per_row]: the last token, and drafts of those after it
    num_tokens: torch.Tensor  # [requests]: the last token included
    block_tables: torch.Tensor  # [requests, W + 1]; nobody reads the last column
    params: torch.Tensor  # [requests, WIDTH]: see kernels/sampling_columns.py

    @classmethod
    def zeros(
        cls, num_requests: int, tokens_per_row: int, max_blocks_per_seq: int, num_params: int, device: torch.device
    ) -> "RequestTables":
        shapes = (tokens_per_row,), (), (max_blocks_per_seq + 1,), (num_params,)
        return cls(*(torch.zeros(num_requests + 1, *dims, dtype=torch.int32, device=device) for dims in shapes))


def place_decodes(batch: DeviceBatch, tables: RequestTables, block_size: int) -> None:
    """Fill in the rows of a batch that decode: token ids, positions, slots, lengths and block tables.

    A sequence has `tokens_per_row` rows, which attend to one token more each: its last token, then drafts. Rows past
    its `num_reserved` are copies of the last one. Padding has no tokens, and slots of -1.
    """
    if (ops := triton_ops(batch.buffer)) is not None:
        ops.place_decodes(batch, tables, block_size)
        return
    k = batch.shape.tokens_per_row
    n = int(batch.num_decodes) if batch.shape.is_padded else batch.shape.num_decodes
    req_indices, (columns, block_ids) = batch.req_indices[: n // k].long(), batch.new_blocks[: n // k].unbind(1)
    tables.block_tables[req_indices, columns] = block_ids
    num_reserved = batch.num_reserved[: n // k, None]
    offsets = torch.arange(k, device=num_reserved.device).minimum(num_reserved - 1).clamp(min=0)  # [D, k]
    lengths = (tables.num_tokens[req_indices, None] + offsets) * (num_reserved > 0)
    positions = (lengths - 1).clamp(min=0)
    rows = tables.block_tables[req_indices, : batch.block_tables.shape[1]]
    slots = rows.gather(1, positions // block_size) * block_size + positions % block_size
    batch.input_ids[:n] = tables.last_token_ids[req_indices[:, None], offsets].flatten()
    batch.positions[:n] = positions.flatten()
    batch.slot_mapping[:n] = slots.where(lengths > 0, -1).flatten()
    batch.context_lens[:n] = lengths.flatten()
    batch.block_tables[:n] = rows.repeat_interleave(k, 0)


def accept(x: SamplerInput, token_ids: torch.Tensor, tables: RequestTables) -> torch.Tensor | None:
    """How many of its sampled tokens [S * k] each sequence gets: counts [S] int32; None if k, `tokens_per_row`, is 1.

    A draft is right if it equals the token that was sampled in its place. Rows whose position is that of the row before
    them have none. The last token becomes the next input, and the length grows.
    """
    if (ops := triton_ops(token_ids)) is not None:
        return ops.accept(x.req_indices, x.positions, token_ids, tables)
    k = tables.last_token_ids.shape[1]
    req_indices, positions, tokens = x.req_indices[::k].long(), x.positions.view(-1, k), token_ids.view(-1, k)
    is_right = tables.last_token_ids[req_indices, 1:] == tokens[:, :-1]
    is_right &= positions[:, 1:] > positions[:, :-1]
    counts = 1 + is_right.cumprod(1).sum(1)
    tables.last_token_ids[req_indices, 0] = tokens.gather(1, counts[:, None] - 1).squeeze(1)
    tables.num_tokens[req_indices] = (positions[:, 0] + 1 + counts).int()
    return counts.int() if k > 1 else None

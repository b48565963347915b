"""Defines the device's tables of running requests, which each step reads and updates.

If tokens are drafted, the host prepares a step before it knows how many tokens the previous step added. The positions
and slots of a step are computed on the device, where the number of added tokens is known.
"""

from typing import Any, NamedTuple

import torch

from nanovllm.batches.batch import DeviceBatch
from nanovllm.kernels import operation


class RequestTables(NamedTuple):
    """Holds int32 arrays with a row for each request index. The last row of each array is for padding. In `params`, a
    row of zeros selects greedy sampling.
    """

    last_token_ids: torch.Tensor  # [requests, K]: the last token, then drafts; -1: no draft
    num_tokens: torch.Tensor  # [requests], including the last token
    block_tables: torch.Tensor  # [requests, W + 1]; the last column absorbs entries of `new_blocks` with column -1
    params: torch.Tensor  # [requests, WIDTH]: see kernels/sampling/sampling_columns.py
    window_tables: torch.Tensor  # [requests, window tables, W + 1]: see cache/window_tables.py

    @property
    def device(self) -> torch.device:
        return self.num_tokens.device

    @classmethod
    def zeros(
        cls,
        num_requests: int,
        tokens_per_row: int,
        max_blocks_per_seq: int,
        num_params: int,
        device: torch.device,
        num_window_tables: int = 0,
    ) -> "RequestTables":
        width = max_blocks_per_seq + 1
        shapes = (tokens_per_row,), (), (width,), (num_params,), (num_window_tables, width)
        return cls(*(torch.zeros(num_requests + 1, *dims, dtype=torch.int32, device=device) for dims in shapes))


@operation
def place_decodes(tables: RequestTables, batch: DeviceBatch, block_size: int) -> None:
    """Fill in the decode rows of a batch: token ids, positions, slots, lengths and block tables.

    A sequence has one row or, with drafts, `tokens_per_row` rows. Rows for padding have length 0 and slot -1.
    """
    k = batch.shape.tokens_per_row
    n = int(batch.num_decode_rows) if batch.shape.is_padded else batch.shape.num_decode_rows
    inputs = batch.req_indices[: n // k], batch.num_reserved[: n // k], batch.new_blocks[: n // k]
    rows, num_reserved, new_blocks = arrays(*inputs)
    last_token_ids, num_tokens, block_tables = arrays(*tables[:3])
    block_tables[rows, new_blocks[:, 0]] = new_blocks[:, 1]
    lengths, token_ids = num_tokens[rows], last_token_ids[rows, 0]
    if k > 1:
        from nanovllm.spec_decode.rows import rows_of_drafts  # lazily, because few engines draft

        rows, num_reserved, lengths, token_ids = rows_of_drafts(k, rows, num_reserved, lengths, last_token_ids)
    positions = lengths - 1
    slots = block_tables[rows, positions // block_size] * block_size + positions % block_size
    if not num_reserved.all():
        is_real = num_reserved > 0
        lengths, positions, slots = lengths * is_real, positions * is_real, (slots + 1) * is_real - 1
    fields = batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables
    row_tables = block_tables[rows, : fields[-1].shape[1]]
    for field, values in zip(arrays(*fields), (token_ids, positions, slots, lengths, row_tables)):
        field[:n] = values


@operation
def accept(
    req_indices: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, tables: RequestTables
) -> torch.Tensor | None:
    """Make each sampled token the next input of its sequence, and increase the sequence's length.

    `req_indices` is [S]. `positions` and `token_ids` are [S * k]. If tokens are drafted (k > 1), return the number of
    tokens that each sequence gets (its accepted drafts plus 1) as an int32 tensor [S].
    """
    if len(token_ids) > len(req_indices):
        from nanovllm.spec_decode.rows import accept_drafts

        return accept_drafts(req_indices, positions, token_ids, tables)
    rows, positions, token_ids = arrays(req_indices, positions, token_ids)
    last_token_ids, num_tokens = arrays(*tables[:2])
    last_token_ids[rows, 0], num_tokens[rows] = token_ids, positions + 2
    return None


def arrays(*tensors: torch.Tensor) -> list[Any]:
    """Return NumPy views of CPU tensors.

    On a CPU, NumPy's operators are much faster than PyTorch's, and compute the same results.
    """
    return [x.numpy() if x.is_cpu else x for x in tensors]

"""Kernels that compute the positions and cache slots of a decode step's tokens. The kernels also store sampled tokens.

`place_decodes` and `accept` are defined in batches/request_tables.py, and `place_chains` in spec_decode/rows.py.

The kernels in this file do not use dependent launch. Before attention waits, it reads the slots, lengths and block
tables that `place_decodes` has written. The early reads of attention are safe, because the embedding kernel, which
does not use dependent launch either, runs between `place_decodes` and attention (see dependent_launch.py).
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import launch_ordinary, next_power_of_2


@triton.jit(do_not_specialize=["width"])
def _place_decodes_kernel(
    batch_ptrs, table_ptrs, out_ptrs, width, WIDTHS: tl.constexpr, BLOCK_SIZE: tl.constexpr, K: tl.constexpr
):
    req_indices_ptr, num_reserved_ptr, new_blocks_ptr, num_decodes_ptr = batch_ptrs
    last_token_ids_ptr, num_tokens_ptr, tables_ptr = table_ptrs
    input_ids_ptr, positions_ptr, slots_ptr, context_lens_ptr, block_tables_ptr = out_ptrs
    seq = tl.program_id(0)
    if num_decodes_ptr is not None and seq * K >= tl.load(num_decodes_ptr):
        return
    req_index = tl.load(req_indices_ptr + seq).to(tl.int64)
    num_reserved = tl.load(num_reserved_ptr + seq)
    new_column = tl.load(new_blocks_ptr + 2 * seq)
    new_block = tl.load(new_blocks_ptr + 2 * seq + 1)
    num_tokens = tl.load(num_tokens_ptr + req_index)
    columns = tl.arange(0, next_power_of_2(WIDTHS[1] - 1))
    table_ptr = tables_ptr + req_index * WIDTHS[1]
    table = tl.where(columns == new_column, new_block, tl.load(table_ptr + columns, columns < width, 0))
    if new_column >= 0:
        tl.store(table_ptr + new_column, new_block)
    for i in tl.static_range(K):
        row = seq * K + i
        offset = tl.maximum(tl.minimum(i, num_reserved - 1), 0)
        length = tl.where(num_reserved > 0, num_tokens + offset, 0)
        position = tl.maximum(length - 1, 0)
        column = position // BLOCK_SIZE
        block = tl.where(column == new_column, new_block, tl.load(table_ptr + column))
        slot = tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(input_ids_ptr + row, tl.maximum(tl.load(last_token_ids_ptr + req_index * WIDTHS[0] + offset), 0))
        tl.store(positions_ptr + row, position)
        tl.store(slots_ptr + row, slot)
        tl.store(context_lens_ptr + row, length)
        tl.store(block_tables_ptr + row.to(tl.int64) * width + columns, table, columns < width)


@triton.jit
def _accept_kernel(batch_ptrs, table_ptrs, counts_ptr, NUM_IDS: tl.constexpr, K: tl.constexpr):
    req_indices_ptr, positions_ptr, token_ids_ptr = batch_ptrs
    last_token_ids_ptr, num_tokens_ptr = table_ptrs
    seq = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + seq).to(tl.int64)
    position = tl.load(positions_ptr + seq * K)
    token_id = tl.load(token_ids_ptr + seq * K)
    count = 1
    for i in tl.static_range(1, K):
        draft = tl.load(last_token_ids_ptr + req_index * NUM_IDS + i)
        is_new = tl.load(positions_ptr + seq * K + i) > tl.load(positions_ptr + seq * K + i - 1)
        is_right = (count == i) & is_new & (draft == tl.load(token_ids_ptr + seq * K + i - 1))
        token_id = tl.where(is_right, tl.load(token_ids_ptr + seq * K + i), token_id)
        count += is_right.to(tl.int32)
    tl.store(last_token_ids_ptr + req_index * NUM_IDS, token_id)
    tl.store(num_tokens_ptr + req_index, position + 1 + count)
    if K > 1:
        tl.store(counts_ptr + seq, count)


def place_decodes(tables, batch, block_size: int) -> None:
    """Fill in the decode rows of `batch` (token ids, positions, slots, lengths and block tables) from `tables`.

    `batch` is a `Batch` on the device, and `tables` is a `RequestTables`.
    """
    k, widths = batch.shape.tokens_per_row, (tables.last_token_ids.shape[1], tables.block_tables.shape[1])
    num_decode_rows = batch.num_decode_rows if batch.shape.is_padded else None
    inputs = batch.req_indices, batch.num_reserved, batch.new_blocks, num_decode_rows
    outputs = batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables
    own = tables.last_token_ids, tables.num_tokens, tables.block_tables
    constants = dict(WIDTHS=widths, BLOCK_SIZE=block_size, K=k)
    constants["num_warps"] = max(1, min(8, triton.next_power_of_2(widths[1] - 1) // 512))
    launch_ordinary(_place_decodes_kernel, (batch.shape.num_decode_rows // k,))(
        inputs, own, outputs, batch.block_tables.shape[1], **constants
    )


def accept(req_indices: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, tables) -> torch.Tensor | None:
    """Store sampled tokens in the tables. Return an int32 tensor [S]: the number of accepted tokens per sequence.

    `req_indices` [S], `positions` [S * k] and `token_ids` [S * k] are int32, with k rows per sequence. Return `None` if
    k is 1 or S is 0.
    """
    num_seqs, own = len(req_indices), tables[:2]
    k = max(1, len(token_ids) // max(1, num_seqs))
    counts = torch.empty(num_seqs, dtype=torch.int32, device=token_ids.device) if k > 1 else None
    launch_ordinary(_accept_kernel, (num_seqs,))(
        (req_indices, positions, token_ids), own, counts, NUM_IDS=own[0].shape[1], K=k, num_warps=1
    )
    return counts if num_seqs else None


@triton.jit
def _slot(table_ptr, position, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _place_chains_kernel(batch_ptrs, table_ptrs, out_ptrs, num_rows, SHAPE: tl.constexpr, TABLE_SIZE: tl.constexpr):
    req_indices_ptr, num_drafts_ptr = batch_ptrs
    num_tokens_ptr, tables_ptr, num_computed_ptr = table_ptrs
    rows_ptr, token_slots_ptr, newest_ptr, newest_slots_ptr = out_ptrs
    STEPS: tl.constexpr = SHAPE.num_steps
    WIDTH: tl.constexpr = SHAPE.width
    seq, num_seqs = tl.program_id(0), tl.num_programs(0)
    req_index = tl.load(req_indices_ptr + seq).to(tl.int64)
    num_drafts = tl.load(num_drafts_ptr + seq)
    length = tl.load(num_tokens_ptr + req_index)
    table_ptr = tables_ptr + req_index * TABLE_SIZE
    is_real = num_drafts > 0
    end = length - SHAPE.shift
    start = tl.load(num_computed_ptr + req_index).to(tl.int32)
    start = tl.minimum(tl.maximum(start, end - WIDTH), end - 1)
    tl.store(num_computed_ptr + req_index, end.to(tl.int64))
    for i in tl.static_range(WIDTH + STEPS - 1):  # rows of the first step, then one row per later step
        if i < WIDTH:
            row = seq * WIDTH + i
            token = tl.minimum(start + SHAPE.shift + i, length - 1)
        else:
            row = num_seqs * i + seq
            token = length - 1 + tl.minimum(i - WIDTH + 1, num_drafts - 1)
        token = tl.where(is_real, token, 0)
        position = tl.where(is_real, token - SHAPE.shift, 0)
        tl.store(rows_ptr + row, position)
        tl.store(rows_ptr + num_rows + row, tl.where(is_real, position + 1, 0))
        tl.store(rows_ptr + 2 * num_rows + row, tl.where(is_real, _slot(table_ptr, position, SHAPE.block_size), -1))
        tl.store(token_slots_ptr + row, _slot(table_ptr, token, SHAPE.block_size).to(tl.int64))
    for i in tl.static_range(STEPS):
        newest = length - 1 + tl.minimum(i, num_drafts - 1)
        slot = _slot(table_ptr, tl.where(i < num_drafts, newest, 0), SHAPE.block_size)
        tl.store(newest_ptr + i * num_seqs + seq, newest)
        tl.store(newest_slots_ptr + i * num_seqs + seq, tl.where(i < num_drafts, slot, -1).to(tl.int64))


def place_chains(
    req_indices: torch.Tensor, num_drafts: torch.Tensor, tables, num_computed: torch.Tensor, shape
) -> tuple[torch.Tensor, ...]:
    """Compute positions and cache slots for a draft model's rows.

    `tables` is a `RequestTables`, and `shape` is a `ChainShape`.
    """
    num_seqs, device = len(req_indices), req_indices.device
    num_rows = num_seqs * (shape.width + shape.num_steps - 1)
    # zeros and -1: in `compile_only`, no kernel fills these tensors, but later operations use them as indices
    words = torch.zeros(5 * num_rows + shape.num_steps * num_seqs, dtype=torch.int32, device=device)
    token_slots, rows, newest = words.split((2 * num_rows, 3 * num_rows, shape.num_steps * num_seqs))
    newest_slots = torch.full((shape.num_steps, num_seqs), -1, dtype=torch.int64, device=device)
    token_slots = token_slots.view(torch.int64)
    outputs = rows, token_slots, newest, newest_slots
    own = tables.num_tokens, tables.block_tables, num_computed
    constants = dict(SHAPE=shape, TABLE_SIZE=tables.block_tables.shape[1], num_warps=1)
    launch_ordinary(_place_chains_kernel, (num_seqs,))((req_indices, num_drafts), own, outputs, num_rows, **constants)
    return *rows.split(num_rows), token_slots, newest.view(-1, num_seqs), newest_slots

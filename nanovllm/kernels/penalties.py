"""Biases and penalties of logits; layers/logits.py defines them.

What a row mentions, the tokens that count for its penalties and then its biases, is compared with itself: no counts are
kept anywhere, so none can be wrong, and a row without mentions ends at once. That costs a tenth of the row's attention to
the same tokens, or less, for as long as those are some ten thousands.
"""
import torch
import triton
import triton.language as tl

from nanovllm.kernels.asked import FREQUENCY_PENALTY, IS_PENALIZED, MIN_LEN, NUM_BIASES, NUM_PROMPT_TOKENS, NUM_STOPS
from nanovllm.kernels.asked import PRESENCE_PENALTY, REPETITION_PENALTY, real
from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch, num_processors

J, I = tl.constexpr(32), tl.constexpr(256)  # mentions that are compared at a time: a program's own, and all
PROMPT = tl.constexpr(1 << 21)  # fields of a sum of mentions, in an int64: of the output, of the prompt, later ones
LATER = tl.constexpr(1 << 42)


@triton.jit
def _mentions(j, length, end, token_ids_ptr, table_ptr, bias_ids_ptr, BLOCK_SIZE: tl.constexpr):
    """Ids that a row mentions, by number: its `length` tokens, then its biases up to `end`; -1 past it."""
    block = tl.load(table_ptr + j // BLOCK_SIZE, j < length, 0).to(tl.int64)
    token = tl.load(token_ids_ptr + block * BLOCK_SIZE + j % BLOCK_SIZE, j < length, 0)
    return tl.where(j < length, token, tl.load(bias_ids_ptr + j - length, (j >= length) & (j < end), -1))


@triton.jit(do_not_specialize=["table_stride"])
def _penalize_kernel(
    logits_ptr, asked_ptr, req_indices_ptr, bias_ids_ptr, biases_ptr, token_ids_ptr, tables_ptr, positions_ptr,
    stride, table_stride, WIDTH: tl.constexpr, MOST: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    asked_ptr += row * WIDTH
    num_tokens = tl.load(positions_ptr + row) + 1
    length = tl.where(tl.load(asked_ptr + IS_PENALIZED) != 0, num_tokens, 0)
    stops = tl.where(num_tokens < tl.load(asked_ptr + MIN_LEN), tl.load(asked_ptr + NUM_STOPS), 0)
    end = length + tl.load(asked_ptr + NUM_BIASES) + stops
    if end == 0:
        return
    num_prompt = tl.load(asked_ptr + NUM_PROMPT_TOKENS)
    repetition = real(asked_ptr, REPETITION_PENALTY)
    table_ptr = tables_ptr + row * table_stride
    bias_ids_ptr += tl.load(req_indices_ptr + row).to(tl.int64) * MOST
    biases_ptr += tl.load(req_indices_ptr + row).to(tl.int64) * MOST
    for begin in range(tl.program_id(1) * J, end, tl.num_programs(1) * J):
        j = begin + tl.arange(0, J)
        ids = _mentions(j, length, end, token_ids_ptr, table_ptr, bias_ids_ptr, BLOCK_SIZE)
        total = tl.zeros([J], tl.int64)
        for first in range(0, end, I):
            i = first + tl.arange(0, I)
            others = _mentions(i, length, end, token_ids_ptr, table_ptr, bias_ids_ptr, BLOCK_SIZE)
            counted = tl.where(i < length, tl.where(i < num_prompt, PROMPT, 1), 0).to(tl.int64)
            weight = tl.where(i[None, :] > j[:, None], LATER, counted[None, :])
            total += tl.sum(tl.where(ids[:, None] == others[None, :], weight, 0), 1)
        bias = tl.zeros([J], tl.float32)
        for first in range(0, end - length, I):
            i = first + tl.arange(0, I)
            others = tl.load(bias_ids_ptr + i, i < end - length, -2)
            values = tl.load(biases_ptr + i, i < end - length, 0.0)
            bias += tl.sum(tl.where(ids[:, None] == others[None, :], values[None, :], 0.0), 1)
        last = (total < LATER) & (j < end)  # of its id's mentions: nobody else reads or writes there
        at = logits_ptr + row * stride + ids
        x = tl.load(at, last, 0.0).to(tl.float32) + bias
        x = tl.where(total > 0, tl.where(x > 0, x / repetition, x * repetition), x)  # of the prompt or the output
        outputs = (total % PROMPT).to(tl.float32)
        x -= real(asked_ptr, FREQUENCY_PENALTY) * outputs
        x -= tl.where(outputs > 0, real(asked_ptr, PRESENCE_PENALTY), 0.0)
        tl.store(at, x.to(logits_ptr.dtype.element_ty), last)


def penalize(logits: torch.Tensor, rows) -> None:
    """Bias and penalise logits [S, vocabulary] in place; `rows` are layers.logits' Rows."""
    if len(logits):
        parts = max(1, min(32, 2 * num_processors(logits.device) // len(logits)))
        launch(_penalize_kernel, (len(logits), parts), logits.device)(
            logits, rows.params, rows.req_indices, rows.bias_ids, rows.biases, rows.token_ids, rows.block_tables,
            rows.positions, logits.stride(0), rows.block_tables.stride(0), WIDTH=rows.params.shape[1],
            MOST=rows.biases.shape[1], BLOCK_SIZE=rows.token_ids.shape[1],
        )  # fmt: skip

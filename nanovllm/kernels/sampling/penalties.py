"""Applies logit biases, penalties, allowed ids and bad words, as defined in features/logit_edits.py.

Each program processes one row at a time. The program has one counter per token id, which starts at zero. First, the
program counts the row's tokens. Then each thread atomically reads a token's counter and sets the counter to zero. The
first thread that reads the counter of a token gets the token's count, and edits the token's logit. At the end, all
counters are zero again. The kernel skips rows whose logits need no edit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2
from nanovllm.kernels.sampling.column_constants import WIDTH, column_constants, load_float

PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY = column_constants(
    "presence_penalty", "frequency_penalty", "repetition_penalty"
)
IS_PENALIZED, HAS_ALLOWED_IDS = column_constants("is_penalized", "has_allowed_ids")
NUM_PROMPT_TOKENS, MIN_LEN = column_constants("num_prompt_tokens", "min_len")
NUM_BIASES, NUM_STOPS, NUM_BAD_WORDS = column_constants("num_biases", "num_stops", "num_bad_words")
IN_PROMPT = tl.constexpr(1 << 30)  # a flag in a count; the lower bits count tokens of the output


class Sizes(NamedTuple):
    max_biases: int
    max_words: int
    word_tokens: int
    block_size: int
    num_masks: int


@triton.jit
def _token_ids(at, tokens, BLOCK_SIZE: tl.constexpr):
    """Load the token ids at positions `at`. `tokens` is (pointer to all ids, pointer to the block table, length)."""
    token_ids_ptr, table_ptr, length = tokens
    block = tl.load(table_ptr + at // BLOCK_SIZE, at < length, 0).to(tl.int64)
    return tl.load(token_ids_ptr + block * BLOCK_SIZE + at % BLOCK_SIZE, at < length, 0)


@triton.jit
def _ban_unset(x_ptr, mask_ptr, vocab_size, TILE: tl.constexpr):
    """Set the logits to -inf for all token ids whose bit in the mask is 0."""
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        words = tl.load(mask_ptr + ids // 32, ids < vocab_size, -1)
        tl.store(x_ptr + ids, float("-inf"), (ids < vocab_size) & (((words >> (ids % 32)) & 1) == 0))


@triton.jit
def _ban_bad_words(x_ptr, words_ptr, num_words, tokens, num_prompt, SIZES: tl.constexpr):
    """Set the logit of a bad word's last token to -inf if the output ends with the word's preceding tokens."""
    TOKENS: tl.constexpr = SIZES.word_tokens
    length = tokens[2]
    # the last place belongs to the token that is sampled now
    word, place = tl.arange(0, SIZES.max_words), tl.arange(0, TOKENS)
    at = length - (TOKENS - 1) + place
    is_output = (at >= num_prompt) & (at < length)
    recent = _token_ids(tl.where(is_output, at, length), tokens, SIZES.block_size)
    recent = tl.where(is_output, recent, -2)  # -2 equals no token id
    words = tl.load(words_ptr + word[:, None] * TOKENS + place[None, :], word[:, None] < num_words, -1)
    matches = (words < 0) | (words == recent[None, :]) | (place == TOKENS - 1)[None, :]
    is_next = (tl.min(matches.to(tl.int32), 1) != 0) & (word < num_words)
    last = tl.load(words_ptr + word * TOKENS + TOKENS - 1, is_next, 0)
    tl.store(x_ptr + last, float("-inf"), is_next)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _penalize_kernel(
    logits_ptr, row_ptrs, edit_ptrs, num_rows, vocab_size, strides, table_stride, SIZES: tl.constexpr, PDL: tl.constexpr
):
    # Program i edits rows i, i + number of programs, ...
    gdc_launch_and_wait(PDL)
    all_params_ptr, req_indices_ptr, token_ids_ptr, tables_ptr, positions_ptr = row_ptrs
    bias_ids_ptr, biases_ptr, allowed_ids_ptr, bad_words_ptr, counts_ptr = edit_ptrs
    stride, counts_stride, mask_stride = strides
    TILE: tl.constexpr = 1024
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    counts_ptr += tl.program_id(0) * counts_stride
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        params_ptr = all_params_ptr + row * WIDTH
        x_ptr = logits_ptr + row * stride
        table_ptr = tables_ptr + row * table_stride
        request = tl.load(req_indices_ptr + row).to(tl.int64)
        length = tl.load(positions_ptr + row) + 1
        tokens = token_ids_ptr, table_ptr, length
        num_prompt = tl.load(params_ptr + NUM_PROMPT_TOKENS)
        has_allowed_ids, num_bad_words = tl.load(params_ptr + HAS_ALLOWED_IDS), tl.load(params_ptr + NUM_BAD_WORDS)
        num_biases = tl.load(params_ptr + NUM_BIASES)
        num_stops = tl.where(length < tl.load(params_ptr + MIN_LEN), tl.load(params_ptr + NUM_STOPS), 0)
        if num_biases + num_stops > 0:
            at = tl.arange(0, SIZES.max_biases)
            entry = request * SIZES.max_biases + at
            ids = tl.load(bias_ids_ptr + entry, at < num_biases + num_stops, 0)
            bias = tl.load(biases_ptr + entry, at < num_biases, 0.0)
            x = tl.load(x_ptr + ids, at < num_biases, 0.0).to(tl.float32) + bias
            tl.store(x_ptr + ids, x.to(dtype), at < num_biases)
            tl.debug_barrier()  # a stop id may also have a bias, which must be stored first
            tl.store(x_ptr + ids, float("-inf"), (at >= num_biases) & (at < num_biases + num_stops))
            tl.debug_barrier()
        if tl.load(params_ptr + IS_PENALIZED) != 0:
            repetition = load_float(params_ptr, REPETITION_PENALTY)
            for first in range(0, length, TILE):
                at = first + tl.arange(0, TILE)
                count = counts_ptr + _token_ids(at, tokens, SIZES.block_size)
                tl.atomic_or(count, IN_PROMPT, at < num_prompt, sem="relaxed")
                tl.atomic_add(count, 1, (at >= num_prompt) & (at < length), sem="relaxed")
            tl.debug_barrier()
            for first in range(0, length, TILE):
                at = first + tl.arange(0, TILE)
                ids = _token_ids(at, tokens, SIZES.block_size)
                count = tl.where(at < length, tl.atomic_xchg(counts_ptr + ids, 0, at < length, sem="relaxed"), 0)
                x = tl.load(x_ptr + ids, count > 0, 0.0).to(tl.float32)
                x = tl.where(x > 0, x / repetition, x * repetition)
                outputs = (count % IN_PROMPT).to(tl.float32)
                x -= load_float(params_ptr, FREQUENCY_PENALTY) * outputs
                x -= tl.where(outputs > 0, load_float(params_ptr, PRESENCE_PENALTY), 0.0)
                tl.store(x_ptr + ids, x.to(dtype), count > 0)
            tl.debug_barrier()
        if has_allowed_ids != 0:
            back = tl.arange(0, next_power_of_2(SIZES.num_masks))  # the rows of a request are adjacent
            is_row = (back < SIZES.num_masks) & (back <= row)
            place = tl.sum((tl.load(req_indices_ptr + row - back, is_row, -1) == request).to(tl.int32)) - 1
            mask_ptr = allowed_ids_ptr + (request * SIZES.num_masks + place) * mask_stride
            _ban_unset(x_ptr, mask_ptr, vocab_size, 4 * TILE)
        if num_bad_words > 0:
            words_ptr = bad_words_ptr + request * SIZES.max_words * SIZES.word_tokens
            _ban_bad_words(x_ptr, words_ptr, num_bad_words, tokens, num_prompt, SIZES)


def penalize(logits: torch.Tensor, rows, tables) -> None:
    """Edit logits [S, vocabulary] in place.

    `rows` is a `SamplingRows`, and `tables` is an `EditTables` (features/logit_edits.py).
    """
    if len(logits):
        params, token_ids, counts = rows.params, rows.token_ids, tables.token_counts
        row_tensors = params, rows.req_indices, token_ids, rows.block_tables, rows.positions
        edits = tables.bias_ids, tables.biases, tables.allowed_masks, tables.bad_words, counts
        strides = logits.stride(0), counts.stride(0), tables.allowed_masks.stride(1)
        words, num_masks = tables.bad_words.shape[1:], tables.allowed_masks.shape[1]
        sizes = Sizes(tables.biases.shape[1], *words, token_ids.shape[1], num_masks)
        launch(_penalize_kernel, (min(len(logits), len(counts)),), logits.device)(
            logits, row_tensors, edits, *logits.shape, strides, rows.block_tables.stride(0), SIZES=sizes, num_warps=8
        )

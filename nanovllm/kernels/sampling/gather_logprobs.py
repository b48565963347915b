"""Computes the log-probability of one token per row in one pass over the logits (definition: features/logprobs.py)."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import launch_ordinary

MAX_TILE = 8192  # logits that a program loads at a time; large, because there may be few programs


@triton.jit
def _token_logprobs_kernel(logits_ptr, ids_ptr, temperatures_ptr, out_ptrs, vocab_size, stride, TILE: tl.constexpr):
    # A program computes one row.
    logprobs_ptr, log_sums_ptr, ranks_ptr = out_ptrs
    row = tl.program_id(0)
    temperature = 1.0
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
    logits = logits_ptr + row.to(tl.int64) * stride
    token_id = tl.load(ids_ptr + row)
    chosen = tl.load(logits + token_id).to(tl.float32) / temperature
    # each lane keeps its largest logit so far, and the sum of exp(logit - largest) over its logits
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    num_before = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab_size, TILE):
        column = begin + tl.arange(0, TILE)
        logit = tl.load(logits + column, column < vocab_size, float("-inf")).to(tl.float32) / temperature
        num_before += ((logit > chosen) | ((logit == chosen) & (column < token_id))).to(tl.int32)
        new_largest = tl.maximum(largest, logit)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # inf - inf would be NaN
        total = total * tl.exp(largest - shift) + tl.exp(logit - shift)
        largest = new_largest
    maximum = tl.max(largest, 0)
    log_sum = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))
    tl.store(logprobs_ptr + row, chosen - log_sum)
    tl.store(log_sums_ptr + row, log_sum)
    tl.store(ranks_ptr + row, 1 + tl.sum(num_before, 0))


def _compute(logits, token_ids, temperatures) -> tuple[torch.Tensor, ...]:
    num_rows, vocab_size = logits.shape
    logprobs, log_sums = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    tile = min(MAX_TILE, triton.next_power_of_2(vocab_size))
    constants, outputs = dict(TILE=tile, num_warps=16 if tile == MAX_TILE else 4), (logprobs, log_sums, ranks)
    launch_ordinary(_token_logprobs_kernel, (num_rows,))(
        logits, token_ids, temperatures, outputs, vocab_size, logits.stride(0), **constants
    )
    return logprobs, log_sums, ranks


def token_logprobs(logits, token_ids, temperatures=None) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, _, ranks = _compute(logits, token_ids, temperatures)
    return logprobs, ranks


def log_sums_and_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' log-sum-exps [S] float32, and the ranks [S] int32 of the tokens. `logits` is [S, vocabulary]."""
    return _compute(logits, token_ids, None)[1:]

"""Gumbel-max sampling over the vocabulary with stateless noise, as defined in layers/sampler.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import launch_ordinary, next_power_of_2
from nanovllm.kernels.sampling.sampling_columns import PHILOX_ROUNDS
from nanovllm.kernels.sampling.token_order import logit_and_id

ROUNDS = tl.constexpr(PHILOX_ROUNDS)
SPLIT_SIZE = 2048


class Splits(NamedTuple):
    """Describes how a row of logits is split, as a compile-time constant. Each program reads one split.

    Noise is generated for four tokens at a time, so the first split begins at a multiple of four.
    """

    number: int
    size: int
    skipped: int  # ids between this multiple of four and the first id


@triton.jit
def _log(x, HARDWARE: tl.constexpr):
    """Return the natural logarithm.

    If HARDWARE is set, use the log2 instruction. The instruction has an error of 2^-22, and saves a dozen instructions.
    """
    if HARDWARE:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return 0.6931471805599453 * tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log(x)


@triton.jit
def _gumbel(bits, HARDWARE: tl.constexpr):
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - v); by its series for small v, where 1 - v would lose the digits that decide which token wins
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -_log(tl.where(v < 0.05, series, -_log(1.0 - v, HARDWARE)), HARDWARE)


@triton.jit
def _sample_split_kernel(
    logits_ptr, row_ptrs, out_ptrs, vocab_size, stride, first_id, SPLITS: tl.constexpr, HARDWARE: tl.constexpr
):
    # Program (row, split) finds the best token of a split. _sample_reduce_kernel finds the best split of a row.
    temperatures_ptr, temperature_stride, seeds_ptr, seed_stride, positions_ptr, cutoffs_ptr = row_ptrs
    best_ptr, index_ptr = out_ptrs
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    position = tl.load(positions_ptr + row)
    seed_low = tl.load(seeds_ptr + row * seed_stride).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed_high = tl.load(seeds_ptr + row * seed_stride + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (seed_high << 32) | seed_low
    if cutoffs_ptr is not None:
        cutoff, last_id = logit_and_id(tl.load(cutoffs_ptr + row))
    first = split * SPLITS.size
    index = tl.maximum(first - SPLITS.skipped, 0)  # a valid token even if no score is above -inf, for example with NaN
    column = first + tl.arange(0, SPLITS.size) - SPLITS.skipped
    inside = (column >= 0) & (column < vocab_size) if SPLITS.skipped else column < vocab_size
    score = tl.load(logits_ptr + row * stride + column, inside, float("-inf")).to(tl.float32)
    if cutoffs_ptr is not None:
        is_filtered = cutoff > float("-inf")  # other rows skip the comparison
        if is_filtered:
            kept = (score > cutoff) | ((score == cutoff) & (column + first_id <= last_id))
            score = tl.where(kept, score, float("-inf"))
    if temperature > 0:
        counter = (first_id - SPLITS.skipped + first) // 4 + tl.arange(0, SPLITS.size // 4)
        zero = counter * 0
        r0, r1, r2, r3 = tl.philox(seed, counter, zero + position, zero, zero, ROUNDS)
        bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [SPLITS.size])  # r0 r1 r2 r3 of each counter
        score = score / temperature + _gumbel(bits, HARDWARE)
    best, place = tl.max(score, 0, return_indices=True)
    index = tl.where(best > float("-inf"), (first + place - SPLITS.skipped).to(tl.int32), index)
    tl.store(best_ptr + row * SPLITS.number + split, tl.maximum(best, float("-inf")))
    tl.store(index_ptr + row * SPLITS.number + split, index + first_id)


@triton.jit
def _sample_reduce_kernel(best_ptr, index_ptr, score_ptr, out_ptr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    split = tl.arange(0, next_power_of_2(SPLITS))
    best = tl.load(best_ptr + row * SPLITS + split, split < SPLITS, float("-inf"))
    index = tl.load(index_ptr + row * SPLITS + split, split < SPLITS, 2147483647)
    score = tl.max(best, 0)
    tl.store(score_ptr + row, score)
    tl.store(out_ptr + row, tl.min(tl.where(best == score, index, 2147483647), 0))


def sample(logits, temperatures, seeds, positions, first_id=0, cutoffs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from each row of logits [S, vocabulary]. Return scores [S] float32 and ids [S] int32.

    `temperatures` is [S] float32. `seeds` is [S, 2] int32 (low and high word). `positions` is [S] int32. `cutoffs` [S]
    int64 contains the smallest key that may be drawn in each row (see token_order.py). Column 0 of the logits belongs
    to token `first_id`. If scores are equal, the token with the lowest id is drawn.
    """
    num_rows, vocab_size = logits.shape
    skipped = first_id % 4
    splits = Splits(triton.cdiv(vocab_size + skipped, SPLIT_SIZE), SPLIT_SIZE, skipped)
    best = torch.empty((num_rows, splits.number), dtype=torch.float32, device=logits.device)
    index = torch.empty((num_rows, splits.number), dtype=torch.int32, device=logits.device)
    score = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        rows = temperatures, temperatures.stride(0), seeds, seeds.stride(0), positions, cutoffs
        launch_ordinary(_sample_split_kernel, (num_rows, splits.number))(
            logits, rows, (best, index), vocab_size, logits.stride(0), first_id, SPLITS=splits, HARDWARE=logits.is_cuda
        )
        launch_ordinary(_sample_reduce_kernel, (num_rows,))(best, index, score, out, SPLITS=splits.number)
    return score, out

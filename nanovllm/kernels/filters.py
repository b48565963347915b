"""Thresholds for top-k, top-p and min-p; layers/logits.py defines them.

Nothing is sorted: a row's maxima over tiles say which few tiles matter, and the threshold is searched among what those hold,
by quarters. A row that asks for nothing ends at once.
"""
import torch
import triton
import triton.language as tl

from nanovllm.kernels.asked import MIN_P, TEMPERATURE, TOP_K, TOP_P, is_filtered, real
from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch, num_processors

TILE = tl.constexpr(512)  # entries of the vocabulary that have a maximum of their own
GROUP = tl.constexpr(8)  # tiles that are read at a time
STAGES = tl.constexpr(4)  # groups that are on their way
MOST_PARTS = 16  # programs that look for a row's maxima
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # zeros at the end of such a number in float32


@triton.jit
def _weigh(row_ptr, maxima, live_ptr, vocab_size, least, more, most, top, temperature, BY_MASS: tl.constexpr):
    """How many entries are `least`, `more` and `most` or larger; or how much of exp((entry - top) / temperature) is."""
    is_live = (maxima >= least).to(tl.int32)
    num_live = tl.sum(is_live, 0)
    tl.debug_barrier()  # the list before has been read
    tl.store(live_ptr + tl.cumsum(is_live, 0) - 1, tl.arange(0, maxima.shape[0]), is_live != 0)
    tl.debug_barrier()
    of_least = tl.zeros([GROUP, TILE], tl.float32)
    of_more, of_most = of_least, of_least
    for first in tl.range(0, num_live, GROUP, num_stages=STAGES):
        live = first + tl.arange(0, GROUP)
        tile = tl.load(live_ptr + live, live < num_live, vocab_size)
        at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(row_ptr + at, at < vocab_size, float("-inf")).to(tl.float32)
        weight = tl.where(at < vocab_size, tl.exp((x - top) / temperature) if BY_MASS else 1.0, 0.0)
        of_least += tl.where(x >= least, weight, 0.0)
        of_more += tl.where(x >= more, weight, 0.0)
        of_most += tl.where(x >= most, weight, 0.0)
    return tl.sum(tl.sum(of_least, 1), 0), tl.sum(tl.sum(of_more, 1), 0), tl.sum(tl.sum(of_most, 1), 0)


@triton.jit
def _key(x, LOW: tl.constexpr):
    """An integer for each number of the logits' dtype, in their order; of those between, the next below."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW).to(tl.int64)


@triton.jit
def _value(key, LOW: tl.constexpr):
    bits = ((key << LOW) | tl.where(key < 0, (1 << LOW) - 1, 0)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _probe(quarters, turn, low, high, top, temperature, LOW: tl.constexpr):
    """So far from `low` to `high`: at first in the distance, then in how many numbers there are, densest around 0."""
    begin = tl.maximum(_value(low, LOW), top - 32 * temperature)
    at = _key(begin + (_value(high, LOW) - begin) * (quarters / 4), LOW)
    at = tl.where(turn < 4, at, low + (high - low) * quarters // 4)
    return tl.minimum(tl.maximum(at, low), high - 1)


@triton.jit
def _search(
    row_ptr, maxima, live_ptr, vocab_size, least, top, temperature, bound, BY_MASS: tl.constexpr, LOW: tl.constexpr
):
    """The least number, between `least` and `top`, above which lies less than `bound`."""
    low, high = _key(least, LOW), _key(top, LOW)
    turn = 0
    while low < high:
        a, b, c = (
            _probe(1, turn, low, high, top, temperature, LOW),
            _probe(2, turn, low, high, top, temperature, LOW),
            _probe(3, turn, low, high, top, temperature, LOW),
        )
        next_a, next_b, next_c = _value(a + 1, LOW), _value(b + 1, LOW), _value(c + 1, LOW)
        above_a, above_b, above_c = _weigh(
            row_ptr, maxima, live_ptr, vocab_size, next_a, next_b, next_c, top, temperature, BY_MASS
        )
        high = tl.where(above_a < bound, a, tl.where(above_b < bound, b, tl.where(above_c < bound, c, high)))
        low = tl.where(above_a < bound, low, tl.where(above_b < bound, a, tl.where(above_c < bound, b, c)) + 1)
        turn += 1
    return _value(low, LOW)


@triton.jit
def _threshold_kernel(
    logits_ptr, asked_ptr, maxima_ptr, live_ptr, arrivals_ptr, out_ptr, vocab_size, stride, WIDTH: tl.constexpr,
    TILES: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    asked_ptr += row * WIDTH
    if tl.program_id(1) == 0:
        tl.store(out_ptr + row, float("-inf"))
    if is_filtered(asked_ptr):
        row_ptr = logits_ptr + row * stride
        masses_ptr = maxima_ptr + (2 * row + 1) * TILES
        maxima_ptr += 2 * row * TILES
        live_ptr += row * TILES
        num_tiles = tl.cdiv(vocab_size, TILE)
        temperature, top_p, min_p = real(asked_ptr, TEMPERATURE), real(asked_ptr, TOP_P), real(asked_ptr, MIN_P)
        top_k = tl.load(asked_ptr + TOP_K)
        is_of_all = (top_k <= 0) & (min_p <= 0)
        for first in tl.range(tl.program_id(1) * GROUP, num_tiles, parts * GROUP, num_stages=STAGES):
            tile = first + tl.arange(0, GROUP)
            at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            x = tl.load(row_ptr + at, at < vocab_size, float("-inf")).to(tl.float32)
            tile_max = tl.max(x, 1)
            tl.store(maxima_ptr + tile, tile_max)
            if is_of_all:  # the mass of which top-p wants a part
                mass = tl.exp((x - tl.maximum(tile_max, -1e30)[:, None]) / temperature)
                tl.store(masses_ptr + tile, tl.sum(mass, 1))
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + row, 1) < parts - 1:
            return  # the last to arrive has all maxima, and does the rest
        tl.store(arrivals_ptr + row, 0)
        threshold = float("-inf")
        maxima = tl.load(maxima_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, float("-inf"))
        top = tl.max(maxima, 0)
        if min_p > 0:
            threshold = top + temperature * tl.log(min_p)
        if top_k > 0:  # there are so many entries from the k-th largest of the maxima on
            kth = tl.where(tl.arange(0, TILES) == top_k - 1, tl.sort(maxima, descending=True), float("-inf"))
            least = tl.maximum(threshold, tl.max(kth, 0))
            bound = top_k.to(tl.float32)
            kth_largest = _search(row_ptr, maxima, live_ptr, vocab_size, least, top, temperature, bound, False, LOW)
            threshold = tl.maximum(threshold, kth_largest)
        if top_p < 1:
            if is_of_all:
                masses = tl.load(masses_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, 0.0)
                mass = tl.sum(masses * tl.exp((maxima - top) / temperature), 0)
            else:
                mass = _weigh(
                    row_ptr, maxima, live_ptr, vocab_size, threshold, threshold, threshold, top, temperature, True
                )[0]
            bound = top_p * mass
            # all entries below this one together are less than 1 - top_p of the largest alone
            least = tl.maximum(threshold, top - temperature * tl.log(vocab_size / (1 - top_p)))
            nucleus = _search(row_ptr, maxima, live_ptr, vocab_size, least, top, temperature, bound, True, LOW)
            threshold = tl.maximum(threshold, nucleus)
        tl.store(out_ptr + row, threshold)


def thresholds(logits: torch.Tensor, rows) -> torch.Tensor:
    """The least logit that each row's min-p, top-k and top-p keep, [S] float32; -inf where a row asks for none."""
    num_rows, vocab_size = logits.shape
    tiles = max(GROUP.value, triton.next_power_of_2(triton.cdiv(vocab_size, TILE.value)))
    maxima = torch.empty((num_rows, 2, tiles), dtype=torch.float32, device=logits.device)  # and the tiles' masses
    live = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        parts = max(1, min(MOST_PARTS, 2 * num_processors(logits.device) // num_rows))
        launch(_threshold_kernel, (num_rows, parts), logits.device)(
            logits, rows.params, maxima, live, rows.arrivals, out, vocab_size, logits.stride(0),
            WIDTH=rows.params.shape[1], TILES=tiles, LOW=LOW_BITS[logits.dtype], num_warps=16,
        )  # fmt: skip
    return out

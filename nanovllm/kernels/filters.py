"""Cutoffs for top-k, top-p and min-p; layers/logits.py defines them.

Nothing is sorted: a row's maxima over tiles say which few tiles matter, and the least logit that is kept is searched
among what those hold, by quarters. Where only some of the tokens that have this logit are kept, one more pass over the
tiles finds the last of them. A row that filters nothing ends at once.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.asked import MIN_P, TEMPERATURE, TOP_K, TOP_P, is_filtered, real
from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch, num_sms
from nanovllm.kernels.token_order import LAST_ID, ordered_bits, token_key

TILE = tl.constexpr(512)  # entries of the vocabulary that have a maximum of their own
GROUP = tl.constexpr(8)  # tiles that are read at a time
STAGES = tl.constexpr(4)  # groups that are on their way
MAX_PROGRAMS_PER_ROW = 16  # programs that look for a row's maxima
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # zeros at the end of such a number in float32


@triton.jit
def _list_live(maxima, live_ptr, least):
    """Write the tiles that have an entry of `least` or larger to `live_ptr`, in ascending order; their number."""
    is_live = (maxima >= least).to(tl.int32)
    tl.debug_barrier()  # the list before has been read
    tl.store(live_ptr + tl.cumsum(is_live, 0) - 1, tl.arange(0, maxima.shape[0]), is_live != 0)
    tl.debug_barrier()
    return tl.sum(is_live, 0)


@triton.jit
def _weigh(row_ptr, maxima, live_ptr, vocab_size, least, more, most, top, temperature, BY_MASS: tl.constexpr):
    """How many entries are `least`, `more` and `most` or larger; or how much of exp((entry - top) / temperature) is."""
    num_live = _list_live(maxima, live_ptr, least)
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
    return (ordered_bits(x.to(tl.int32, bitcast=True)) >> LOW).to(tl.int64)


@triton.jit
def _value(key, LOW: tl.constexpr):
    bits = ((key << LOW) | tl.where(key < 0, (1 << LOW) - 1, 0)).to(tl.int32)
    return ordered_bits(bits).to(tl.float32, bitcast=True)


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
    """The least number, between `least` and `top`, above which lies less than `bound`, and how much does."""
    low, high = _key(least, LOW), _key(top, LOW)
    above = 0.0  # of `high`
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
        above = tl.where(above_c < bound, above_c, above)
        above = tl.where(above_a < bound, above_a, tl.where(above_b < bound, above_b, above))
        low = tl.where(above_a < bound, low, tl.where(above_b < bound, a, tl.where(above_c < bound, b, c)) + 1)
        turn += 1
    return _value(low, LOW), above


@triton.jit
def _find_equal(row_ptr, maxima, live_ptr, counts_ptr, vocab_size, value, n, TILES: tl.constexpr):
    """The id of the `n`-th entry, in ascending order, that equals `value`; LAST_ID if there are fewer."""
    num_live = _list_live(maxima, live_ptr, value)
    for first in tl.range(0, num_live, GROUP, num_stages=STAGES):
        live = first + tl.arange(0, GROUP)
        tile = tl.load(live_ptr + live, live < num_live, vocab_size)
        at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(row_ptr + at, at < vocab_size, float("-inf")).to(tl.float32)
        tl.store(counts_ptr + live, tl.sum((x == value).to(tl.float32), 1), live < num_live)
    tl.debug_barrier()
    live = tl.arange(0, TILES)
    counts = tl.load(counts_ptr + live, live < num_live, 0.0).to(tl.int32)
    up_to = tl.cumsum(counts, 0)
    holds_it = (up_to - counts < n) & (up_to >= n)  # one tile at most
    before = tl.sum(tl.where(holds_it, up_to - counts, 0), 0)
    is_there = tl.max(holds_it.to(tl.int32), 0) != 0
    tile = tl.load(live_ptr + tl.sum(tl.where(holds_it, live, 0), 0), is_there, 0)
    at = tile * TILE + tl.arange(0, TILE)
    equal = (tl.load(row_ptr + at, at < vocab_size, float("-inf")).to(tl.float32) == value).to(tl.int32)
    is_it = (equal != 0) & (before + tl.cumsum(equal, 0) == n) & is_there
    return tl.min(tl.where(is_it, at, LAST_ID), 0)


@dependent_kernel()
@triton.jit
def _cutoff_kernel(
    logits_ptr,
    asked_ptr,
    maxima_ptr,
    live_ptr,
    arrivals_ptr,
    out_ptr,
    vocab_size,
    stride,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    asked_ptr += row * WIDTH
    if tl.program_id(1) == 0:
        tl.store(out_ptr + row, token_key(tl.full([], float("-inf"), tl.float32), tl.full([], LAST_ID, tl.int32)))
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
        cutoff = float("-inf")
        num_equal = tl.full([], LAST_ID, tl.int32)  # how many of the entries that equal the cutoff are kept; all
        maxima = tl.load(maxima_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, float("-inf"))
        top = tl.max(maxima, 0)
        top = tl.where(top == 0, 0.0, top)  # -0 would have a key of its own
        if min_p > 0:
            cutoff = top + temperature * tl.log(min_p)
        if top_k > 0:  # there are so many entries from the k-th largest of the maxima on
            kth = tl.where(tl.arange(0, TILES) == top_k - 1, tl.sort(maxima, descending=True), float("-inf"))
            least = tl.maximum(cutoff, tl.max(kth, 0))
            bound = top_k.to(tl.float32)
            kth_largest, above = _search(
                row_ptr, maxima, live_ptr, vocab_size, least, top, temperature, bound, False, LOW
            )
            num_equal = tl.where(kth_largest >= cutoff, top_k - above.to(tl.int32), num_equal)
            cutoff = tl.maximum(cutoff, kth_largest)
        if top_p < 1:
            if is_of_all:
                masses = tl.load(masses_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, 0.0)
                mass = tl.sum(masses * tl.exp((maxima - top) / temperature), 0)
            else:
                more = _value(_key(cutoff, LOW) + 1, LOW)
                mass, above, _ = _weigh(
                    row_ptr, maxima, live_ptr, vocab_size, cutoff, more, more, top, temperature, True
                )
                mass = tl.minimum(mass, above + num_equal.to(tl.float32) * tl.exp((cutoff - top) / temperature))
            bound = top_p * mass
            # all entries below this one together are less than 1 - top_p of the largest alone
            least = tl.maximum(cutoff, top - temperature * tl.log(vocab_size / (1 - top_p)))
            nucleus, above = _search(row_ptr, maxima, live_ptr, vocab_size, least, top, temperature, bound, True, LOW)
            missing = tl.ceil((bound - above) / tl.exp((nucleus - top) / temperature))
            missing = tl.minimum(tl.maximum(missing, 1.0), 1e9).to(tl.int32)
            num_equal = tl.where(nucleus > cutoff, missing, num_equal)
            num_equal = tl.where(nucleus == cutoff, tl.minimum(num_equal, missing), num_equal)
            cutoff = tl.maximum(cutoff, nucleus)
        last_id = tl.full([], LAST_ID, tl.int32)
        if (num_equal < LAST_ID) & (cutoff > float("-inf")):
            last_id = _find_equal(row_ptr, maxima, live_ptr, masses_ptr, vocab_size, cutoff, num_equal, TILES)
        tl.store(out_ptr + row, token_key(cutoff, last_id))


def logit_cutoffs(logits: torch.Tensor, rows) -> torch.Tensor:
    """The key [S] int64 of the last token that each row's min-p, top-k and top-p keep; `token_order` has the keys.

    Of a row that filters nothing it is the key that no token is below.
    """
    num_rows, vocab_size = logits.shape
    tiles = max(GROUP.value, triton.next_power_of_2(triton.cdiv(vocab_size, TILE.value)))
    maxima = torch.empty((num_rows, 2, tiles), dtype=torch.float32, device=logits.device)  # and the tiles' masses
    live = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        parts = max(1, min(MAX_PROGRAMS_PER_ROW, 2 * num_sms(logits.device) // num_rows))
        launch(_cutoff_kernel, (num_rows, parts), logits.device)(
            logits,
            rows.params,
            maxima,
            live,
            rows.arrivals,
            out,
            vocab_size,
            logits.stride(0),
            WIDTH=rows.params.shape[1],
            TILES=tiles,
            LOW=LOW_BITS[logits.dtype],
            num_warps=16,
        )
    return out

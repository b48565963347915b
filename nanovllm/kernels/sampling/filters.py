"""Computes the cutoffs of top-k, top-p and min-p without sorting (definition: layers/sampler.py).

The vocabulary is divided into tiles. Only a few tiles contain logits above a bound. The maximum of a tile shows whether
the tile contains any such logit. A search finds the smallest logit that the filters keep. Each iteration divides the
remaining interval into four parts. If only some of the tokens with the smallest kept logit are kept, one more pass
finds the last kept token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.kernels.sampling.column_constants import MIN_P, TEMPERATURE, TOP_K, TOP_P, WIDTH, is_filtered, load_float
from nanovllm.kernels.sampling.token_order import LAST_ID, ordered_bits, token_key

TILE = tl.constexpr(512)  # token ids per tile
GROUP = tl.constexpr(8)  # tiles that are read at a time
STAGES = tl.constexpr(4)  # stages of the software pipeline that reads groups
MAX_PROGRAMS_PER_ROW = 16  # programs that share the computation of a row's tile maxima


class Row(NamedTuple):
    logits_ptr: tl.tensor
    tile_maxima: tl.tensor
    tiles_ptr: tl.tensor  # memory for a list of tiles
    vocab_size: tl.tensor
    max: tl.tensor
    temperature: tl.tensor


@triton.jit
def _list_tiles(row, bound):
    """Make an ascending list of the tiles that contain a logit >= `bound`. Return the length of the list."""
    is_listed = (row.tile_maxima >= bound).to(tl.int32)
    tl.debug_barrier()  # all threads have read the previous list
    at = row.tiles_ptr + tl.cumsum(is_listed, 0) - 1
    tl.store(at, tl.arange(0, row.tile_maxima.shape[0]), is_listed != 0)
    tl.debug_barrier()
    return tl.sum(is_listed, 0)


@triton.jit
def _load_tiles(row, entry, num_listed):
    """Load the tiles at positions `entry` [GROUP] of the list of tiles.

    Return token ids, and logits padded with -inf, both [GROUP, TILE].
    """
    tile = tl.load(row.tiles_ptr + entry, entry < num_listed, row.vocab_size)
    ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return ids, tl.load(row.logits_ptr + ids, ids < row.vocab_size, float("-inf")).to(tl.float32)


@triton.jit
def _weight(x, row):
    return tl.exp((x - row.max) / row.temperature)


@triton.jit
def _sum_above(row, bound_1, bound_2, bound_3, BY_MASS: tl.constexpr):
    """For each of three ascending bounds, return the number of logits that are >= the bound.

    If BY_MASS is set, return the sum of the logits' weights exp((logit - max) / temperature) instead of the number of
    logits.
    """
    num_listed = _list_tiles(row, bound_1)
    sum_1 = tl.zeros([GROUP, TILE], tl.float32)
    sum_2, sum_3 = sum_1, sum_1
    for first in tl.range(0, num_listed, GROUP, num_stages=STAGES):
        ids, x = _load_tiles(row, first + tl.arange(0, GROUP), num_listed)
        weight = tl.where(ids < row.vocab_size, _weight(x, row) if BY_MASS else 1.0, 0.0)
        sum_1 += tl.where(x >= bound_1, weight, 0.0)
        sum_2 += tl.where(x >= bound_2, weight, 0.0)
        sum_3 += tl.where(x >= bound_3, weight, 0.0)
    return tl.sum(tl.sum(sum_1, 1), 0), tl.sum(tl.sum(sum_2, 1), 0), tl.sum(tl.sum(sum_3, 1), 0)


@triton.jit
def _key(x, LOW: tl.constexpr):
    """Round a number down to the dtype of the logits.

    Return the position of the result among all numbers of the dtype.
    """
    return (ordered_bits(x.to(tl.int32, bitcast=True)) >> LOW).to(tl.int64)


@triton.jit
def _value(key, LOW: tl.constexpr):
    bits = ((key << LOW) | tl.where(key < 0, (1 << LOW) - 1, 0)).to(tl.int32)
    return ordered_bits(bits).to(tl.float32, bitcast=True)


@triton.jit
def _probe(quarters, iteration, low, high, row, LOW: tl.constexpr):
    """Return the key at `quarters` / 4 of the distance from `low` to `high`.

    The first four iterations measure the distance in logits. Later iterations measure the distance in keys, because
    floating-point numbers are densest around 0.
    """
    begin = tl.maximum(_value(low, LOW), row.max - 32 * row.temperature)
    key = _key(begin + (_value(high, LOW) - begin) * (quarters / 4), LOW)
    key = tl.where(iteration < 4, key, low + (high - low) * quarters // 4)
    return tl.minimum(tl.maximum(key, low), high - 1)


@triton.jit
def _search(row, lower_bound, target, BY_MASS: tl.constexpr, LOW: tl.constexpr):
    """Find the smallest number >= `lower_bound` such that fewer than `target` logits exceed it.

    If BY_MASS is set, the weights (see `_sum_above`) of the logits above the number must add up to less than `target`.
    Return the number that was found, and the count (or the sum of the weights) of the logits above it.
    """
    low, high = _key(lower_bound, LOW), _key(row.max, LOW)
    above = 0.0  # the amount above `high`
    iteration = 0
    while low < high:
        a = _probe(1, iteration, low, high, row, LOW)
        b = _probe(2, iteration, low, high, row, LOW)
        c = _probe(3, iteration, low, high, row, LOW)
        next_a, next_b, next_c = _value(a + 1, LOW), _value(b + 1, LOW), _value(c + 1, LOW)
        above_a, above_b, above_c = _sum_above(row, next_a, next_b, next_c, BY_MASS)
        high = tl.where(above_a < target, a, tl.where(above_b < target, b, tl.where(above_c < target, c, high)))
        above = tl.where(above_c < target, above_c, above)
        above = tl.where(above_a < target, above_a, tl.where(above_b < target, above_b, above))
        low = tl.where(above_a < target, low, tl.where(above_b < target, a, tl.where(above_c < target, b, c)) + 1)
        iteration += 1
    return _value(low, LOW), above


@triton.jit
def _find_equal(row, counts_ptr, value, n):
    """Return the n-th lowest token id whose logit equals `value`, or LAST_ID if there is none."""
    num_listed = _list_tiles(row, value)
    for first in tl.range(0, num_listed, GROUP, num_stages=STAGES):
        entry = first + tl.arange(0, GROUP)
        _, x = _load_tiles(row, entry, num_listed)
        tl.store(counts_ptr + entry, tl.sum((x == value).to(tl.float32), 1), entry < num_listed)
    tl.debug_barrier()
    entry = tl.arange(0, row.tile_maxima.shape[0])
    counts = tl.load(counts_ptr + entry, entry < num_listed, 0.0).to(tl.int32)
    cumulative = tl.cumsum(counts, 0)
    has_nth = (cumulative - counts < n) & (cumulative >= n)  # for one tile at most
    before = tl.sum(tl.where(has_nth, cumulative - counts, 0), 0)
    exists = tl.max(has_nth.to(tl.int32), 0) != 0
    tile = tl.load(row.tiles_ptr + tl.sum(tl.where(has_nth, entry, 0), 0), exists, 0)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row.logits_ptr + ids, ids < row.vocab_size, float("-inf")).to(tl.float32)
    equal = (x == value).to(tl.int32)
    is_nth = (equal != 0) & (before + tl.cumsum(equal, 0) == n) & exists
    return tl.min(tl.where(is_nth, ids, LAST_ID), 0)


@dependent_kernel()
@triton.jit
def _cutoff_kernel(
    logits_ptr, params_ptr, work_ptrs, out_ptr, vocab_size, stride, TILES: tl.constexpr, PDL: tl.constexpr
):
    # Program (row, i) computes the i-th share of a row's tile maxima. The last program of a row to finish then computes
    # the cutoff.
    gdc_launch_and_wait(PDL)
    tile_maxima_ptr, tiles_ptr, num_finished_ptr = work_ptrs
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    # the number of trailing zero bits of the logits in float32
    LOW: tl.constexpr = 0 if dtype == tl.float32 else (13 if dtype == tl.float16 else 16)
    row = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(1)
    params_ptr += row * WIDTH
    if tl.program_id(1) == 0:
        tl.store(out_ptr + row, token_key(tl.full([], float("-inf"), tl.float32), tl.full([], LAST_ID, tl.int32)))
    if is_filtered(params_ptr):
        row_ptr = logits_ptr + row * stride
        tile_masses_ptr = tile_maxima_ptr + (2 * row + 1) * TILES
        tile_maxima_ptr += 2 * row * TILES
        tiles_ptr += row * TILES
        num_tiles = tl.cdiv(vocab_size, TILE)
        temperature, min_p = load_float(params_ptr, TEMPERATURE), load_float(params_ptr, MIN_P)
        top_k, top_p = tl.load(params_ptr + TOP_K), load_float(params_ptr, TOP_P)
        is_top_p_only = (top_k <= 0) & (min_p <= 0)
        for first in tl.range(tl.program_id(1) * GROUP, num_tiles, num_programs * GROUP, num_stages=STAGES):
            tile = first + tl.arange(0, GROUP)
            ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            x = tl.load(row_ptr + ids, ids < vocab_size, float("-inf")).to(tl.float32)
            tile_max = tl.max(x, 1)
            tl.store(tile_maxima_ptr + tile, tile_max)
            if is_top_p_only:  # top-p needs the mass of the whole vocabulary
                mass = tl.exp((x - tl.maximum(tile_max, -1e30)[:, None]) / temperature)
                tl.store(tile_masses_ptr + tile, tl.sum(mass, 1))
        tl.debug_barrier()
        if tl.atomic_add(num_finished_ptr + row, 1) < num_programs - 1:
            return  # the last program of the row has all tile maxima, and continues
        tl.store(num_finished_ptr + row, 0)
        cutoff = float("-inf")
        num_equal = tl.full([], LAST_ID, tl.int32)  # how many logits equal to the cutoff are kept; at first, all
        tile_maxima = tl.load(tile_maxima_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, float("-inf"))
        row_max = tl.max(tile_maxima, 0)
        row_max = tl.where(row_max == 0, 0.0, row_max)  # the keys of -0 and 0 differ
        this = Row(row_ptr, tile_maxima, tiles_ptr, vocab_size, row_max, temperature)
        if min_p > 0:
            cutoff = row_max + temperature * tl.log(min_p)
        if top_k > 0:  # at least k logits are as large as the k-th largest tile maximum
            kth = tl.where(tl.arange(0, TILES) == top_k - 1, tl.sort(tile_maxima, descending=True), float("-inf"))
            lower_bound = tl.maximum(cutoff, tl.max(kth, 0))
            kth_largest, above = _search(this, lower_bound, top_k.to(tl.float32), False, LOW)
            num_equal = tl.where(kth_largest >= cutoff, top_k - above.to(tl.int32), num_equal)
            cutoff = tl.maximum(cutoff, kth_largest)
        if top_p < 1:
            if is_top_p_only:
                tile_masses = tl.load(tile_masses_ptr + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles, 0.0)
                mass = tl.sum(tile_masses * _weight(tile_maxima, this), 0)
            else:
                next_number = _value(_key(cutoff, LOW) + 1, LOW)
                mass, above, _ = _sum_above(this, cutoff, next_number, next_number, True)
                mass = tl.minimum(mass, above + num_equal.to(tl.float32) * _weight(cutoff, this))
            target = top_p * mass
            # all tokens with logits below this bound together weigh less than 1 - top_p times the likeliest token
            lower_bound = tl.maximum(cutoff, row_max - temperature * tl.log(vocab_size / (1 - top_p)))
            nucleus, above = _search(this, lower_bound, target, True, LOW)
            num_needed = tl.ceil((target - above) / _weight(nucleus, this))
            num_needed = tl.minimum(tl.maximum(num_needed, 1.0), 1e9).to(tl.int32)
            num_equal = tl.where(nucleus > cutoff, num_needed, num_equal)
            num_equal = tl.where(nucleus == cutoff, tl.minimum(num_equal, num_needed), num_equal)
            cutoff = tl.maximum(cutoff, nucleus)
        last_id = tl.full([], LAST_ID, tl.int32)
        if (num_equal < LAST_ID) & (cutoff > float("-inf")):
            last_id = _find_equal(this, tile_masses_ptr, cutoff, num_equal)
        tl.store(out_ptr + row, token_key(cutoff, last_id))


def logit_cutoffs(logits: torch.Tensor, rows) -> torch.Tensor:
    """Return the smallest key (see token_order.py) that min-p, top-k and top-p keep in each row, as int64 [S].

    `logits` is [S, vocabulary], and `rows` is a `SamplingRows` (layers/sampler.py). A row without filters gets the
    smallest possible key.
    """
    num_rows, vocab_size = logits.shape
    tiles = max(GROUP.value, triton.next_power_of_2(triton.cdiv(vocab_size, TILE.value)))
    # tile maxima, and the masses of tiles
    tile_maxima = torch.empty((num_rows, 2, tiles), dtype=torch.float32, device=logits.device)
    tile_lists = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        num_programs = max(1, min(MAX_PROGRAMS_PER_ROW, 2 * num_sms(logits.device) // num_rows))
        work = tile_maxima, tile_lists, rows.num_finished_programs
        launch(_cutoff_kernel, (num_rows, num_programs), logits.device)(
            logits, rows.params, work, out, vocab_size, logits.stride(0), TILES=tiles, num_warps=16
        )
    return out

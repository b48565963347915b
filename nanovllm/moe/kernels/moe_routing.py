"""Routing for a mixture of experts: chooses the experts of each token, and sorts the rows of the grouped GEMMs.

A *pair* is a token and one of its `top_k` choices. The pair's index is `token * top_k + choice`. In the grouped GEMMs,
each pair has one row, and rows are sorted by expert. A *tile* is a range of at most TILE_M rows of one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2
from nanovllm.kernels.launch.gpu_features import has_tma, num_sms
from nanovllm.kernels.linear.split_k_gemm import TILE_K, TILE_N, split_k_gemm

MAX_SPLIT_K = 8  # of the router's matmul; the routing kernel adds the summands
# A *share* is a range of pairs that are all compared with each other. A program handles a block of pairs. If there are
# at most LONE_SHARE pairs, they form a single share.
LONE_SHARE, LONE_BLOCK, SHARE, BLOCK = 2048, 16, 256, 64
MIN_SHARE, MAX_SHARES = 128, tl.constexpr(1024)  # at least one pair for each thread
TILE_FIELDS = tl.constexpr(3)  # expert or -1, first row, end row


class Routing(NamedTuple):
    """The experts of each token, sorted by descending probability, then by id. Shared experts come last."""

    weights: torch.Tensor  # [T, top_k] float32
    expert_ids: torch.Tensor  # [T, top_k] int32
    num_experts: int  # of all ranks


class ExpertRows(NamedTuple):
    pairs: torch.Tensor  # [T * top_k] int32: the index of each row's pair
    table: torch.Tensor  # [num_tiles, TILE_FIELDS] int32; unused tiles have an expert of -1
    tile_m: int


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x W^T. x is [T, K], and W is the router's weight [experts, K]. Return summands [split_k, T, experts].

    The result is float32 on Hopper, so that experts rarely have equal logits. Other GPUs return the dtype of x.
    """
    num_experts, k = weight.shape
    if not has_tma(x.device) or x.dtype == torch.float32 or k % 8:
        return torch.mm(x, weight.t())[None]
    num_tiles = triton.cdiv(num_experts, TILE_N) * triton.cdiv(len(x), 64)
    split_k = max(1, min(MAX_SPLIT_K, num_sms(x.device) // num_tiles, k // TILE_K))
    out = torch.empty((split_k, len(x), num_experts), dtype=torch.float32, device=x.device)
    return split_k_gemm(x, weight, split_k, out)


@triton.jit
def _load_logits(ptr, is_inside, part_size, SPLIT_K: tl.constexpr):
    """Load the logits. Each logit is the sum of SPLIT_K summands."""
    logits = tl.load(ptr, is_inside, float("-inf")).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        logits += tl.load(ptr + part * part_size, is_inside, 0.0).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


class RouteSizes(NamedTuple):
    num_experts: int  # without shared experts
    top_k: int
    num_shared: int  # experts that every token uses; their ids come last
    split_k: int
    renormalize: bool
    block_t: int  # tokens per program, one warp for each


@dependent_kernel(early=("slot_mapping_ptr",))
@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(logits_ptr, terms, slot_mapping_ptr, out_ptrs, num_tokens, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Each program routes `block_t` tokens.

    NaN logits are treated as -inf. Columns that belong to no expert are also -inf, so ids are always valid.
    """
    bias_ptr, factors_ptr = terms
    weights_ptr, ids_ptr = out_ptrs
    E: tl.constexpr = SIZES.num_experts
    TOP_K: tl.constexpr = SIZES.top_k
    SHARED: tl.constexpr = SIZES.num_shared
    BLOCK_T: tl.constexpr = SIZES.block_t
    BLOCK_E: tl.constexpr = next_power_of_2(E)
    BLOCK_K: tl.constexpr = next_power_of_2(TOP_K + SHARED)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    source = token
    if slot_mapping_ptr is not None:
        source = tl.where(tl.load(slot_mapping_ptr + token, token < num_tokens, 0) < 0, 0, token)
    gdc_launch_and_wait(PDL)
    expert = tl.arange(0, BLOCK_E)[None, :]
    is_token = (token < num_tokens)[:, None]
    row, part_size = logits_ptr + source[:, None] * (E + SHARED), num_tokens * (E + SHARED)
    logits = _load_logits(row + expert, is_token & (expert < E), part_size, SIZES.split_k)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, expert < E, 0.0).to(tl.float32)
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0.0 has other bits than 0.0

    # integers with the same order as the logits (all bits of negative numbers except the sign are inverted), because a
    # warp finds the largest integer in one instruction
    bits = logits.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    choice = tl.arange(0, BLOCK_K)[None, :]
    bits = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    expert_ids = bits
    for i in tl.static_range(TOP_K):
        largest = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == largest, expert, BLOCK_E), 1)[:, None]
        bits = tl.where(choice == i, largest, bits)
        expert_ids = tl.where(choice == i, first, expert_ids)
        key = tl.where(expert == first, -2147483648, key)
    chosen = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    chosen = tl.where(choice < TOP_K, chosen, float("-inf"))

    highest = tl.max(chosen, 1)[:, None]
    weights = tl.exp(chosen - highest)
    total = tl.sum(weights, 1) if SIZES.renormalize else tl.sum(tl.exp(logits - highest), 1)
    weights /= total[:, None]
    at, is_inside = token[:, None] * (TOP_K + SHARED) + choice, is_token & (choice < TOP_K + SHARED)
    if SHARED > 0:
        shared = E + choice - TOP_K
        gates = _load_logits(row + shared, is_inside & (choice >= TOP_K), part_size, SIZES.split_k)
        weights = tl.where(choice < TOP_K, weights, 1.0 / (1.0 + tl.exp(-gates)))
        expert_ids = tl.where(choice < TOP_K, expert_ids, shared)
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + expert_ids, is_inside, 0.0).to(tl.float32)
    tl.store(weights_ptr + at, weights, is_inside)
    tl.store(ids_ptr + at, expert_ids.to(tl.int32), is_inside)


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping: torch.Tensor | None = None,
    num_shared: int = 0,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> Routing:
    """Choose `top_k` experts for each token by a float32 softmax, and append the `num_shared` shared experts.

    The softmax covers all experts that are not shared. `logits` [split_k, T, experts] contains summands, which are
    added over the first dimension. T must be positive. `bias` [experts] is added to the sums. Only models without
    shared experts have a `bias`. If `renormalize` is True, the weights of the chosen experts add up to 1. Finally, the
    weights are multiplied by `factors` [experts]. If experts have equal logits, the lowest id comes first. `torch.topk`
    defines no order for equal logits. Tokens with a negative slot are padding. Padding gets the experts of the first
    token, so that no additional weights are read. Shared experts have the last ids, and their weights are the sigmoids
    of their logits.
    """
    split_k, num_tokens, num_logits = logits.shape
    num_experts, shape = num_logits - num_shared, (num_tokens, top_k + num_shared)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    block_t = 1 if num_shared else 4  # with more tokens, the unaligned rows would be spread over all warps
    sizes = RouteSizes(num_experts, top_k, num_shared, split_k, renormalize, block_t)
    operands = logits, (bias, factors), slot_mapping, (weights, expert_ids), num_tokens
    launch(_route_kernel, (triton.cdiv(num_tokens, block_t),), logits.device)(*operands, SIZES=sizes, num_warps=block_t)
    return Routing(weights, expert_ids, num_experts)


class SortSizes(NamedTuple):
    num_experts: int  # of this rank
    share: int  # pairs that are compared with each other
    block: int  # pairs per program
    bins: int  # a power of two, larger than num_experts


@triton.jit
def _load_keys(ids_ptr, pair, num_pairs, first_expert, SIZES: tl.constexpr):
    """Return keys that order a share's pairs by expert, then by index. Experts of other ranks come last."""
    expert = tl.load(ids_ptr + pair, pair < num_pairs, -1) - first_expert
    is_local = (expert >= 0) & (expert < SIZES.num_experts) & (pair < num_pairs)
    return tl.where(is_local, expert, SIZES.num_experts) * SIZES.share + pair % SIZES.share


@dependent_kernel()
@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _count_kernel(ids_ptr, rows_ptr, num_pairs, first_expert, SIZES: tl.constexpr, PDL: tl.constexpr):
    """For one share of the pairs, each program stores where each expert's rows begin, and the number of these rows.

    The result is [2, bins, shares].
    """
    gdc_launch_and_wait(PDL)
    share, num_shares = tl.program_id(0), tl.num_programs(0)
    pair = share * SIZES.share + tl.arange(0, SIZES.share)
    key = _load_keys(ids_ptr, pair, num_pairs, first_expert, SIZES)
    counts = tl.histogram(key // SIZES.share, SIZES.bins)
    expert = tl.arange(0, SIZES.bins)
    field = rows_ptr + expert * num_shares + share
    tl.store(field, tl.cumsum(counts, 0) - counts, expert < SIZES.num_experts)
    tl.store(field + SIZES.bins * num_shares, counts, expert < SIZES.num_experts)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_shares"])
def _scan_kernel(rows_ptr, num_shares, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Each program handles one expert. The expert's number of rows is stored in the field of the first share.

    For each share of the pairs, store how many rows of other shares sort before the share's rows of the expert.
    """
    gdc_launch_and_wait(PDL)
    share = tl.arange(0, MAX_SHARES)
    field = rows_ptr + tl.program_id(0) * num_shares
    rows = tl.load(field + share, share < num_shares, 0)
    counts = tl.load(field + SIZES.bins * num_shares + share, share < num_shares, 0)
    tl.store(field + share, tl.sum(rows, 0) - rows + tl.cumsum(counts, 0) - counts, share < num_shares)
    tl.store(field + SIZES.bins * num_shares, tl.sum(counts, 0))


@dependent_kernel()
@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_tiles"])
def _sort_kernel(in_ptrs, out_ptrs, num_pairs, first_expert, num_tiles, tile_m, SIZES: tl.constexpr, PDL: tl.constexpr):
    """The first program writes the table of tiles, and each other program writes the rows of a block of pairs.

    The row of a pair is the number of pairs that sort before that pair.
    """
    gdc_launch_and_wait(PDL)
    ids_ptr, rows_ptr = in_ptrs
    pairs_ptr, table_ptr = out_ptrs
    first_pair = tl.maximum(tl.program_id(0) - 1, 0) * SIZES.block
    share, num_shares = first_pair // SIZES.share, tl.cdiv(num_pairs, SIZES.share)
    other = share * SIZES.share + tl.arange(0, SIZES.share)
    other_key = _load_keys(ids_ptr, other, num_pairs, first_expert, SIZES)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, SIZES.bins)
        counts = tl.histogram(other_key // SIZES.share, SIZES.bins)
        if rows_ptr is not None:
            counts = tl.load(rows_ptr + (SIZES.bins + expert) * num_shares, expert < SIZES.num_experts, 0)
        end_row = tl.cumsum(counts, 0)
        row = end_row - counts
        tiles = tl.where(expert < SIZES.num_experts, tl.cdiv(counts, tile_m), 0)
        field = table_ptr + (tl.cumsum(tiles, 0) - tiles) * TILE_FIELDS
        for tile in range(tl.max(tiles, 0)):
            tl.store(field, expert, tile < tiles)
            tl.store(field + 1, row, tile < tiles)
            row += tile_m
            tl.store(field + 2, tl.minimum(row, end_row), tile < tiles)
            field += TILE_FIELDS
        for begin in range(tl.sum(tiles, 0), num_tiles, SIZES.bins):
            tl.store(table_ptr + (begin + expert) * TILE_FIELDS, -1, begin + expert < num_tiles)
    else:
        pair = first_pair + tl.arange(0, SIZES.block)
        key = _load_keys(ids_ptr, pair, num_pairs, first_expert, SIZES)
        place = tl.sum((other_key[:, None] < key[None, :]).to(tl.int32), 0)
        is_local = key < SIZES.num_experts * SIZES.share
        if rows_ptr is not None:
            place += tl.load(rows_ptr + key // SIZES.share * num_shares + share, is_local, 0)
        tl.store(pairs_ptr + place, pair, is_local)


def max_tiles(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """Return the maximum number of tiles. No tile is empty, and only the last tile of each expert can be partial."""
    return min(num_pairs, (num_pairs + num_experts * (tile_m - 1)) // tile_m)


def sort_by_expert(expert_ids: torch.Tensor, first_expert: int, num_experts: int, tile_m: int) -> ExpertRows:
    """Return the rows and tiles of `num_experts` experts, from `first_expert` on.

    `expert_ids` is [T, top_k] int32. T must be positive. An expert's rows are sorted by pair index. The sizes of the
    results depend only on shapes, so the last entries of `pairs` may stay unwritten.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_tiles = max_tiles(num_pairs, num_experts, tile_m)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table = torch.empty((num_tiles, TILE_FIELDS.value), dtype=torch.int32, device=device)
    share, bins = (max(MIN_SHARE, triton.next_power_of_2(size)) for size in (num_pairs, num_experts + 1))
    block, num_warps, rows = LONE_BLOCK, 4, None
    if is_divided := share > LONE_SHARE:
        share, block, num_warps = max(SHARE, share // MAX_SHARES.value), BLOCK, 8
    sizes, num_shares = SortSizes(num_experts, share, block, bins), triton.cdiv(num_pairs, share)
    if is_divided:
        rows = torch.empty((2, bins, num_shares), dtype=torch.int32, device=device)
        launch(_count_kernel, (num_shares,), device)(expert_ids, rows, num_pairs, first_expert, SIZES=sizes)
        launch(_scan_kernel, (num_experts,), device)(rows, num_shares, SIZES=sizes)
    operands = (expert_ids, rows), (pairs, table), num_pairs, first_expert, num_tiles, tile_m
    launch(_sort_kernel, (1 + triton.cdiv(num_pairs, block),), device)(*operands, SIZES=sizes, num_warps=num_warps)
    return ExpertRows(pairs, table, tile_m)

"""Mixture of experts: which experts each token is routed to, and the order of the rows of the grouped products.

A pair is a token and one of its `top_k` slots, with the index token * top_k + slot; its expert computes one row of the
grouped products. Rows are pairs sorted by expert. A tile is a range of at most TILE_M rows of one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    has_tma,
    launch,
    num_sms,
)
from nanovllm.kernels.split_k_gemm import TILE_K, TILE_N, split_k_gemm

MAX_SPLIT_K = 8  # of the router's product, whose partial sums are added up by every program that routes
MIN_CHUNK, MAX_CHUNK = 128, 8192  # pairs that a sorting program reads at once; an element for each thread at least
TILE_FIELDS = tl.constexpr(3)  # expert or -1, first row, and the row after the last


class Routing(NamedTuple):
    """Where each token goes. Experts of a token are sorted by probability, equal ones by id."""

    weights: torch.Tensor  # [T, top_k] float32
    expert_ids: torch.Tensor  # [T, top_k] int32
    num_experts: int  # of all ranks


class ExpertRows(NamedTuple):
    """The rows of the grouped products."""

    pairs: torch.Tensor  # [T * top_k] int32: the pair of each row
    table: torch.Tensor  # [num_tiles, TILE_FIELDS] int32; unused tiles have an expert of -1
    tile_m: int


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times the router's weight [experts, K] transposed, as partial sums [split_k, T, experts].

    They are float32 on Hopper, so that few experts have equal logits. Elsewhere they have the dtype of x.
    """
    num_experts, k = weight.shape
    if not has_tma(x.device) or x.dtype == torch.float32 or k % 8:
        return torch.mm(x, weight.t())[None]
    num_tiles = triton.cdiv(num_experts, TILE_N) * triton.cdiv(len(x), 64)
    split_k = max(1, min(MAX_SPLIT_K, num_sms(x.device) // num_tiles, k // TILE_K))
    out = torch.empty((split_k, len(x), num_experts), dtype=torch.float32, device=x.device)
    return split_k_gemm(x, weight, split_k, out)


@triton.jit
def rank_experts(logits_ptr, part_size, E: tl.constexpr, BLOCK_E: tl.constexpr, SPLIT_K: tl.constexpr):
    """A token's logits in float32, and the rank of each expert among them, both [BLOCK_E].

    Equal logits are ranked by id. NaN, which unused rows may have, counts as -inf, and so does an id without an expert.
    So ranks are a permutation for any logits, and the first experts are valid and distinct.
    """
    expert = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + expert, expert < E, float("-inf")).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        logits += tl.load(logits_ptr + part * part_size + expert, expert < E, 0.0).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    is_larger = logits[:, None] > logits[None, :]
    is_equal_before = (logits[:, None] == logits[None, :]) & (expert[:, None] < expert[None, :])
    return logits, tl.sum((is_larger | is_equal_before).to(tl.int32), 0)


@triton.jit
def routing_weights(logits, rank, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr):
    """The softmax of the logits; with RENORMALIZE, that of the first TOP_K experts alone."""
    weight = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(tl.where(rank < TOP_K, weight, 0.0), 0) if RENORMALIZE else tl.sum(weight, 0)
    return weight / total


@dependent_kernel()
@triton.jit(do_not_specialize=["part_size"])
def _route_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    part_size,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    logits, rank = rank_experts(logits_ptr + token * E, part_size, E, BLOCK_E, SPLIT_K)
    at = token * TOP_K + rank
    tl.store(weights_ptr + at, routing_weights(logits, rank, TOP_K, RENORMALIZE), rank < TOP_K)
    tl.store(ids_ptr + at, tl.arange(0, BLOCK_E), rank < TOP_K)


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """The `top_k` experts of each token, by the softmax over all experts in float32.

    `logits` [split_k, T, experts] are partial sums. With `renormalize`, a token's weights add up to 1. Of equal logits,
    the lower expert id comes first (torch.topk leaves their order open).
    """
    split_k, num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        launch(_route_kernel, (num_tokens,), logits.device)(
            logits,
            weights,
            expert_ids,
            num_tokens * num_experts,
            E=num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            SPLIT_K=split_k,
            RENORMALIZE=renormalize,
            num_warps=4,
        )
    return Routing(weights, expert_ids, num_experts)


@triton.jit
def _load_local_ids(ids_ptr, pair, num_pairs, first_expert, E: tl.constexpr):
    """The pairs' experts by their index on this rank; E for experts of other ranks and beyond the last pair."""
    expert = tl.load(ids_ptr + pair, pair < num_pairs, -1) - first_expert
    return tl.where((expert >= 0) & (expert < E) & (pair < num_pairs), expert, E)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "first_expert"])
def _sort_kernel(
    ids_ptr,
    pairs_ptr,
    table_ptr,
    num_pairs,
    num_tiles,
    first_expert,
    E: tl.constexpr,
    TILE_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each expert: it counts the pairs of all experts, and writes the rows and tiles of its own."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        counts += tl.histogram(_load_local_ids(ids_ptr, pair, num_pairs, first_expert, E), BINS)
    other = tl.arange(0, BINS)
    counts = tl.where(other < E, counts, 0)
    tiles = (counts + TILE_M - 1) // TILE_M
    first_row = tl.sum(tl.where(other < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(other < expert, tiles, 0), 0)
    end_row = first_row + tl.sum(tl.where(other == expert, counts, 0), 0)

    tile_row = table_ptr + first_tile * TILE_FIELDS
    for begin in range(first_row, end_row, TILE_M):
        tl.store(tile_row, expert)
        tl.store(tile_row + 1, begin)
        tl.store(tile_row + 2, tl.minimum(begin + TILE_M, end_row))
        tile_row += TILE_FIELDS
    for unused in range(tl.sum(tiles, 0) + expert, num_tiles, E):
        tl.store(table_ptr + unused * TILE_FIELDS, -1)

    row = first_row
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        is_mine = (_load_local_ids(ids_ptr, pair, num_pairs, first_expert, E) == expert).to(tl.int32)
        tl.store(pairs_ptr + row + tl.cumsum(is_mine, 0) - 1, pair, is_mine == 1)
        row += tl.sum(is_mine, 0)


def max_tiles(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """The largest possible number of tiles: each has a row, and each expert's last one may lack all rows but one."""
    return min(num_pairs, (num_pairs + num_experts * (tile_m - 1)) // tile_m)


def sort_by_expert(expert_ids: torch.Tensor, first_expert: int, num_experts: int, tile_m: int) -> ExpertRows:
    """The rows and tiles of this rank's experts, `num_experts` from `first_expert` on; rows of an expert by pair.

    `expert_ids` is [T, top_k] int32. Sizes depend on shapes only. What is left of `pairs` is not written.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_tiles = max_tiles(num_pairs, num_experts, tile_m)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table = torch.empty((num_tiles, TILE_FIELDS.value), dtype=torch.int32, device=device)
    if num_pairs:
        chunk = min(MAX_CHUNK, max(MIN_CHUNK, triton.next_power_of_2(num_pairs)))
        launch(_sort_kernel, (num_experts,), device)(
            expert_ids,
            pairs,
            table,
            num_pairs,
            num_tiles,
            first_expert,
            E=num_experts,
            TILE_M=tile_m,
            CHUNK=chunk,
            BINS=max(MIN_CHUNK, triton.next_power_of_2(num_experts + 1)),
            num_warps=4 if chunk <= 2048 else 16,
        )
    return ExpertRows(pairs, table, tile_m)

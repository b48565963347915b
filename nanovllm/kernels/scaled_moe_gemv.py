"""Mixture of experts for a few tokens, with weights of 8-bit values times scales; as moe_gemv.py for other weights."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.moe_routing import Routing
from nanovllm.kernels.scaled_gemv import columns_of_lanes, multiply_groups
from nanovllm.kernels.scaled_tiles import as_loadable, block_shape

GATE_UP_TILE = 4, 2048, 4  # TILE_N, TILE_K and warps
DOWN_TILE = 2, 256, 1  # a warp alone has no barriers, and all its loads are in flight


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_gate_up_gemv_kernel(
    x_ptr,
    norm_weight_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    out_ptr,
    first_expert,
    eps,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOCAL_E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    token = pair // TOP_K
    expert = tl.load(ids_ptr + pair) - first_expert
    if (expert < 0) | (expert >= LOCAL_E):
        return
    COLUMNS: tl.constexpr = K // BLOCK_K
    BY_GROUP: tl.constexpr = COLUMNS > 1
    GROUP: tl.constexpr = BLOCK_K if BY_GROUP else TILE_K
    LANE: tl.constexpr = 16 if GROUP >= 16 else GROUP
    first_n = tl.program_id(0) * TILE_N
    n = first_n + tl.arange(0, TILE_N)
    group = tl.arange(0, TILE_K // GROUP)
    k = columns_of_lanes(TILE_K, GROUP, LANE)
    group = group[None, :, None]
    is_row = (n < N)[:, None, None, None]
    first_row = expert.to(tl.int64) * 2 * N
    gate_w = w_ptr + (first_row + n)[:, None, None, None] * K + k[None, :]
    up_w = gate_w + N * K
    gate_scales = scale_ptr + (first_row + first_n) // BLOCK_N * COLUMNS
    up_scales = scale_ptr + (first_row + N + first_n) // BLOCK_N * COLUMNS
    gate = tl.zeros([TILE_N, TILE_K // GROUP, GROUP // LANE], tl.float32)
    up = tl.zeros([TILE_N, TILE_K // GROUP, GROUP // LANE], tl.float32)
    squares = tl.zeros([TILE_K // GROUP, GROUP // LANE], tl.float32)
    for begin in tl.static_range(0, K, TILE_K):  # unrolled: several loads are in flight
        at, at_group = begin + k, begin // GROUP + group
        inside = at < K
        x = tl.load(x_ptr + token * K + at, inside, 0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, 2)
            x *= tl.load(norm_weight_ptr + at, inside, 0.0).to(tl.float32)
        x = x[None, :]
        gate_tile = tl.load(gate_w + begin, is_row & inside[None, :], 0.0)
        up_tile = tl.load(up_w + begin, is_row & inside[None, :], 0.0)
        gate += multiply_groups(gate_tile, x, gate_scales, at_group, COLUMNS, BY_GROUP)
        up += multiply_groups(up_tile, x, up_scales, at_group, COLUMNS, BY_GROUP)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if HAS_NORM else 1.0
    y = tl.sum(tl.sum(gate, 2), 1) * scale
    up_y = tl.sum(tl.sum(up, 2), 1) * scale
    if not BY_GROUP:
        y *= tl.load(scale_ptr + (first_row + n) // BLOCK_N, n < N, 0.0)
        up_y *= tl.load(scale_ptr + (first_row + N + n) // BLOCK_N, n < N, 0.0)
    y = y / (1.0 + tl.exp(-y)) * up_y
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), n < N)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_down_gemv_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    first_expert,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOCAL_E: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum over a token's experts, all in one program."""
    COLUMNS: tl.constexpr = K // BLOCK_K
    BY_GROUP: tl.constexpr = COLUMNS > 1
    # a tile may be narrower than a block
    GROUP: tl.constexpr = BLOCK_K if BY_GROUP and BLOCK_K < TILE_K else TILE_K
    LANE: tl.constexpr = 16 if GROUP >= 16 else GROUP
    token = tl.program_id(1)
    first_n = tl.program_id(0) * TILE_N
    n = first_n + tl.arange(0, TILE_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.arange(0, TILE_K // GROUP)
    k = columns_of_lanes(TILE_K, GROUP, LANE)
    is_row = (n < N)[:, None, None, None]
    acc = tl.zeros([TILE_N, TILE_K // GROUP, GROUP // LANE], tl.float32)
    for slot in tl.static_range(TOP_K):  # unrolled: the loads of several experts are in flight
        pair = token * TOP_K + slot
        weight = tl.load(weights_ptr + pair)
        expert = tl.load(ids_ptr + pair) - first_expert
        is_local = (expert >= 0) & (expert < LOCAL_E)
        limit = tl.where(is_local, K, 0)  # other ranks have the other experts
        first_row = expert.to(tl.int64) * N
        w = w_ptr + (first_row + n)[:, None, None, None] * K + k[None, :]
        row_scales = scale_ptr + (first_row + first_n) // BLOCK_N * COLUMNS
        if not BY_GROUP:
            scales = tl.load(scale_ptr + (first_row + n) // BLOCK_N, n < tl.where(is_local, N, 0), 0.0)[:, None, None]
        for begin in tl.static_range(0, K, TILE_K):
            at = begin + k
            inside = at < limit
            at_group = ((begin + group * GROUP) // BLOCK_K)[None, :, None]
            h = (tl.load(h_ptr + pair * K + at, inside, 0.0).to(tl.float32) * weight)[None, :]
            tile = tl.load(w + begin, is_row & inside[None, :], 0.0)
            columns = tl.where(is_local, COLUMNS, 0)
            y = multiply_groups(tile, h, row_scales, at_group, columns, BY_GROUP)
            if not BY_GROUP:
                y *= scales
            acc += y
    tl.store(out_ptr + token * N + n, tl.sum(tl.sum(acc, 2), 1).to(out_ptr.dtype.element_ty), n < N)


def scaled_moe_gemv(
    x: torch.Tensor,
    routing: Routing,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    first_expert: int = 0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_gemv` with weights of values [experts, N, K] and scales [experts, N / block rows, K / block columns]."""
    (num_tokens, top_k), (num_local, hidden, size) = routing.expert_ids.shape, down[0].shape
    h = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if out is None else out
    constants = dict(LOCAL_E=num_local, TOP_K=top_k)
    tile_n, tile_k, num_warps = GATE_UP_TILE
    block_n, block_k = block_shape(*gate_up)
    tile_k = max(min(tile_k, triton.next_power_of_2(hidden)), block_k if block_k < hidden else 1)
    tile_n = min(tile_n, block_n) if block_k < hidden else tile_n
    launch(_scaled_gate_up_gemv_kernel, (triton.cdiv(size, tile_n), num_tokens * top_k), x.device, shared=50)(
        x,
        norm_weight,
        as_loadable(gate_up[0]),
        gate_up[1],
        routing.expert_ids,
        h,
        first_expert,
        eps,
        size,
        K=hidden,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_NORM=norm_weight is not None,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=num_warps,
        **constants,
    )
    tile_n, tile_k, num_warps = DOWN_TILE
    block_n, block_k = block_shape(*down)
    tile_n = min(tile_n, block_n) if block_k < size else tile_n
    launch(_scaled_down_gemv_kernel, (triton.cdiv(hidden, tile_n), num_tokens), x.device, shared=50)(
        h,
        as_loadable(down[0]),
        down[1],
        routing.weights,
        routing.expert_ids,
        out,
        first_expert,
        hidden,
        K=size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=num_warps,
        **constants,
    )
    return out

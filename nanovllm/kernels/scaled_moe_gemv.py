"""Mixture of experts for a few tokens, with weights of 8-bit values times scales; as moe_gemv.py for other weights."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.fp8 import decode_e4m3
from nanovllm.kernels.moe_gemv import Sizes
from nanovllm.kernels.moe_routing import Routing
from nanovllm.kernels.tiles import as_loadable, columns_of_parts, shape_of

GATE_UP_TILE = 4, 2048, 4  # TILE_N, TILE_K and warps
DOWN_TILE = 2, 256, 1  # a warp alone has no barriers, and all its loads are in flight
LANE = tl.constexpr(8)  # weights that a thread loads at once


@triton.jit
def _scales_of_parts(scale_ptr, begin, k, SHAPE: tl.constexpr):
    """The scales [parts] that columns begin + k have in the row of blocks from scale_ptr on, 1 if it is a single block.

    k are those of `columns_of_parts`.
    """
    part = tl.arange(0, k.shape[0])
    if SHAPE.block_k < SHAPE.k:
        column = begin + part * k.shape[1]
        scales = tl.load(scale_ptr + column // SHAPE.block_k, column < SHAPE.k, 0.0)
    else:
        scales = tl.full([k.shape[0]], 1.0, tl.float32)
    return scales


@triton.jit
def _load_parts(ptr, k, is_row, SHAPE: tl.constexpr, TILE_K: tl.constexpr):
    """Weights at pointers [rows, parts, LANE] to the columns k [parts, LANE] of rows, 0 outside; is_row is [rows]."""
    inside = is_row[:, None, None]
    if SHAPE.k % TILE_K > 0:
        inside &= (k < SHAPE.k)[None]
    return tl.load(ptr, inside, 0.0)


@triton.jit
def _load_parts_of_x(x_ptr, k, SHAPE: tl.constexpr, TILE_K: tl.constexpr):
    """The elements at k [parts, LANE] of a row as float32 [1, parts, LANE], 0 outside."""
    x = tl.load(x_ptr + k) if SHAPE.k % TILE_K == 0 else tl.load(x_ptr + k, k < SHAPE.k, 0.0)
    return x.to(tl.float32)[None]


@triton.jit
def _multiply_parts(w, x, scales):
    """Sums [rows, parts] of weights [rows, parts, LANE] times x [1, parts, LANE], and times scales [parts]."""
    return tl.sum(decode_e4m3(w, tl.float32) * x, 2) * scales[None, :]


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_gate_up_gemv_kernel(
    x_ptr, w_ptrs, ids_ptr, out_ptr, first_expert, N, SHAPE: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_and_wait(PDL)
    w_ptr, scale_ptr = w_ptrs
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair) - first_expert
    if (expert < 0) | (expert >= SIZES.num_local):
        return
    K: tl.constexpr = SHAPE.k
    TILE_K: tl.constexpr = SIZES.tile_k
    COLUMNS: tl.constexpr = K // SHAPE.block_k
    first_n = tl.program_id(0) * SIZES.tile_n
    n = first_n + tl.arange(0, SIZES.tile_n)
    is_row = n < N
    k = columns_of_parts(TILE_K, SHAPE.block_k, LANE)
    x_row = x_ptr + pair // SIZES.top_k * K
    first_row = expert.to(tl.int64) * 2 * N
    gate_w = w_ptr + (first_row + n)[:, None, None] * K + k[None]
    up_w = gate_w + N * K
    gate_scales_at = scale_ptr + (first_row + first_n) // SHAPE.block_n * COLUMNS
    up_scales_at = scale_ptr + (first_row + N + first_n) // SHAPE.block_n * COLUMNS
    gate = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    up = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    for begin in tl.static_range(0, K, TILE_K):  # unrolled: several loads are in flight
        at = begin + k
        gate_tile = _load_parts(gate_w + begin, at, is_row, SHAPE, TILE_K)
        up_tile = _load_parts(up_w + begin, at, is_row, SHAPE, TILE_K)
        gate_scales = _scales_of_parts(gate_scales_at, begin, k, SHAPE)
        up_scales = _scales_of_parts(up_scales_at, begin, k, SHAPE)
        x = _load_parts_of_x(x_row, at, SHAPE, TILE_K)
        gate += _multiply_parts(gate_tile, x, gate_scales)
        up += _multiply_parts(up_tile, x, up_scales)
    y = tl.sum(gate, 1)
    up_y = tl.sum(up, 1)
    if COLUMNS == 1:
        y *= tl.load(scale_ptr + (first_row + n) // SHAPE.block_n, is_row, 0.0)
        up_y *= tl.load(scale_ptr + (first_row + N + n) // SHAPE.block_n, is_row, 0.0)
    y = y / (1.0 + tl.exp(-y)) * up_y
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), is_row)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_down_gemv_kernel(
    h_ptr, w_ptrs, choice_ptrs, out_ptr, first_expert, N, SHAPE: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """The sum over a token's experts, all in one program."""
    K: tl.constexpr = SHAPE.k
    TILE_K: tl.constexpr = SIZES.tile_k
    COLUMNS: tl.constexpr = K // SHAPE.block_k
    TOP_K: tl.constexpr = SIZES.top_k
    w_ptr, scale_ptr = w_ptrs
    weights_ptr, ids_ptr = choice_ptrs
    token = tl.program_id(1)
    first_n = tl.program_id(0) * SIZES.tile_n
    n = first_n + tl.arange(0, SIZES.tile_n)
    gdc_launch_and_wait(PDL)
    k = columns_of_parts(TILE_K, SHAPE.block_k, LANE)
    acc = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: the loads of several experts are in flight
        pair = token * TOP_K + choice
        weight = tl.load(weights_ptr + pair)
        expert = tl.load(ids_ptr + pair) - first_expert
        is_local = (expert >= 0) & (expert < SIZES.num_local)  # other ranks have the other experts
        is_row = n < tl.where(is_local, N, 0)
        first_row = tl.where(is_local, expert, 0).to(tl.int64) * N
        w = w_ptr + (first_row + n)[:, None, None] * K + k[None]
        scales_at = scale_ptr + (first_row + first_n) // SHAPE.block_n * COLUMNS
        y = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
        for begin in tl.static_range(0, K, TILE_K):
            at = begin + k
            tile = _load_parts(w + begin, at, is_row, SHAPE, TILE_K)
            h = _load_parts_of_x(h_ptr + pair * K, at, SHAPE, TILE_K)
            y += _multiply_parts(tile, h, _scales_of_parts(scales_at, begin, k, SHAPE))
        y *= weight
        if COLUMNS == 1:
            y *= tl.load(scale_ptr + (first_row + n) // SHAPE.block_n, is_row, 0.0)[:, None]
        acc += tl.where(is_local, y, 0.0)
    tl.store(out_ptr + token * N + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), n < N)


def scaled_moe_gemv(
    x: torch.Tensor,
    routing: Routing,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    first_expert: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_gemv` without a norm, with weights of values [experts, N, K] and scales [experts, N / rows, K / columns]."""
    (num_tokens, top_k), (num_local, hidden, size) = routing.expert_ids.shape, down[0].shape
    h = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if out is None else out
    tile_n, tile_k, num_warps = GATE_UP_TILE
    shape = shape_of(*gate_up)
    tile_n = min(tile_n, shape.block_n) if shape.block_k < hidden else tile_n
    sizes = Sizes(hidden, num_local, top_k, tile_n, min(tile_k, triton.next_power_of_2(hidden)))
    weight, constants = (as_loadable(gate_up[0]), gate_up[1]), dict(SHAPE=shape, SIZES=sizes, num_warps=num_warps)
    launch(_scaled_gate_up_gemv_kernel, (triton.cdiv(size, tile_n), num_tokens * top_k), x.device, shared=50)(
        x, weight, routing.expert_ids, h, first_expert, size, **constants
    )
    tile_n, tile_k, num_warps = DOWN_TILE
    shape = shape_of(*down)
    tile_n = min(tile_n, shape.block_n) if shape.block_k < size else tile_n
    sizes = Sizes(size, num_local, top_k, tile_n, tile_k)
    weight, constants = (as_loadable(down[0]), down[1]), dict(SHAPE=shape, SIZES=sizes, num_warps=num_warps)
    launch(_scaled_down_gemv_kernel, (triton.cdiv(hidden, tile_n), num_tokens), x.device, shared=50)(
        h, weight, routing[:2], out, first_expert, hidden, **constants
    )
    return out

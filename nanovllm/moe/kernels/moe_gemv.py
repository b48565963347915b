"""Mixture of experts for a few tokens: matrix-vector multiplications with the chosen experts' weights.

If weights have 8 bits, a thread loads LANE adjacent values of one scale block together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.e4m3 import decode_e4m3
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.tiles import NO_NORM, Weight, as_loadable, columns_of_parts, shape_of, values_and_scales
from nanovllm.moe.kernels.moe_routing import Routing

MAX_GEMV_TOKENS = 4  # with more, several choose the same expert, and a grouped GEMM reads an expert's weights only once
# TILE_N, TILE_K, warps; a program with one warp needs no barriers, and all its loads are in flight
GATE_UP_TILE, SCALED_GATE_UP_TILE, DOWN_TILE = (1, 1024, 1), (4, 2048, 4), (2, 256, 1)
LANE = tl.constexpr(8)


class Sizes(NamedTuple):
    num_local: int  # experts of this rank
    top_k: int
    tile_n: int
    tile_k: int


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _gate_up_gemv_kernel(
    x_ptrs,
    w_ptrs,
    ids_ptr,
    out_ptr,
    first_expert,
    eps,
    N,
    SHAPE: tl.constexpr,
    SIZES: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program computes tile_n outputs of the activation, for a pair of a token and an expert.
    gdc_launch_and_wait(PDL)
    x_ptr, norm_weight_ptr = x_ptrs
    K: tl.constexpr = SHAPE.k
    TILE_K: tl.constexpr = SIZES.tile_k
    pair = tl.program_id(1)
    token = pair // SIZES.top_k
    expert = tl.load(ids_ptr + pair) - first_expert
    if (expert < 0) | (expert >= SIZES.num_local):
        return
    n = tl.program_id(0) * SIZES.tile_n + tl.arange(0, SIZES.tile_n)
    k = tl.arange(0, TILE_K)
    gate_w = w_ptrs[0] + (expert.to(tl.int64) * 2 * N + n)[:, None] * K + k[None, :]
    up_w = gate_w + N * K
    gate = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    up = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    squares = tl.zeros([k.shape[0]], tl.float32)
    for begin in tl.static_range(0, K, TILE_K):  # unrolled: several loads are in flight
        x = tl.load(x_ptr + token * K + begin + k, begin + k < K, 0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            squares += x * x
            x *= tl.load(norm_weight_ptr + begin + k, begin + k < K, 0.0).to(tl.float32)
        inside = (n < N)[:, None] & (begin + k < K)[None, :]
        gate += tl.load(gate_w + begin, inside, 0.0).to(tl.float32) * x[None, :]
        up += tl.load(up_w + begin, inside, 0.0).to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if norm_weight_ptr is not None else 1.0
    y = tl.sum(gate, 1) * scale
    y = activate(y, tl.sum(up, 1) * scale, ACT)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), n < N)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    h_ptr, w_ptrs, choice_ptrs, out_ptr, first_expert, N, SHAPE: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """Each program computes `tile_n` outputs of a token, summed over the token's experts."""
    weights_ptr, ids_ptr = choice_ptrs
    K: tl.constexpr = SHAPE.k
    TILE_K: tl.constexpr = SIZES.tile_k
    TOP_K: tl.constexpr = SIZES.top_k
    token = tl.program_id(1)
    n = tl.program_id(0) * SIZES.tile_n + tl.arange(0, SIZES.tile_n)
    gdc_launch_and_wait(PDL)
    k = tl.arange(0, TILE_K)
    acc = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: the loads of several experts are in flight
        pair = token * TOP_K + choice
        weight = tl.load(weights_ptr + pair)
        expert = tl.load(ids_ptr + pair) - first_expert
        limit = tl.where((expert >= 0) & (expert < SIZES.num_local), K, 0)  # other ranks have the other experts
        w = w_ptrs[0] + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        for begin in tl.static_range(0, K, TILE_K):
            inside = begin + k < limit
            h = tl.load(h_ptr + pair * K + begin + k, inside, 0.0).to(tl.float32) * weight
            acc += tl.load(w + begin, (n < N)[:, None] & inside[None, :], 0.0).to(tl.float32) * h[None, :]
    tl.store(out_ptr + token * N + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), n < N)


@triton.jit
def _scales_of_parts(scale_ptr, begin, k, SHAPE: tl.constexpr):
    """Load the scales [parts] of columns `begin + k`. If a scale block spans whole rows, return ones.

    `k` [parts, LANE] comes from `columns_of_parts`.
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
    """Load columns `k` [parts, LANE] of weights from pointers [rows, parts, LANE].

    `is_row` [rows] tells which rows exist. All other rows are filled with 0.
    """
    inside = is_row[:, None, None]
    if SHAPE.k % TILE_K > 0:
        inside &= (k < SHAPE.k)[None]
    return tl.load(ptr, inside, 0.0)


@triton.jit
def _load_parts_of_x(x_ptr, k, SHAPE: tl.constexpr, TILE_K: tl.constexpr):
    """Load elements `k` [parts, LANE] of a row as float32 [1, parts, LANE]. Elements outside the row are 0."""
    x = tl.load(x_ptr + k) if SHAPE.k % TILE_K == 0 else tl.load(x_ptr + k, k < SHAPE.k, 0.0)
    return x.to(tl.float32)[None]


@triton.jit
def _multiply_parts(w, x, scales):
    """Multiply w [rows, parts, LANE] by x [1, parts, LANE] and by `scales` [parts]. Sum the products over LANE."""
    return tl.sum(decode_e4m3(w, tl.float32) * x, 2) * scales[None, :]


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_gate_up_gemv_kernel(
    x_ptrs,
    w_ptrs,
    ids_ptr,
    out_ptr,
    first_expert,
    eps,
    N,
    SHAPE: tl.constexpr,
    SIZES: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `_gate_up_gemv_kernel` for 8-bit weights, but without a norm."""
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
    x_row = x_ptrs[0] + pair // SIZES.top_k * K
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
    y = activate(y, up_y, ACT)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), is_row)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _scaled_down_gemv_kernel(
    h_ptr, w_ptrs, choice_ptrs, out_ptr, first_expert, N, SHAPE: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """Compute `_down_gemv_kernel` for 8-bit weights."""
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


def _operands(weight: Weight, tile: tuple[int, int, int], top_k: int) -> tuple[tuple, dict]:
    """Return the arguments and the constants of a kernel for a weight [experts, N, K]."""
    values, scales = values_and_scales(weight)
    shape, (tile_n, tile_k, num_warps) = shape_of(values, scales), tile
    if shape.block_k < shape.k:  # all rows of a program must be in the same row of blocks
        tile_n = min(tile_n, shape.block_n)
    sizes = Sizes(len(values), top_k, tile_n, min(tile_k, 1 << (shape.k - 1).bit_length()))
    return (as_loadable(values), scales), dict(SHAPE=shape, SIZES=sizes, num_warps=num_warps)


def moe_gemv(
    x: torch.Tensor,
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    first_expert: int = 0,
    norm=NO_NORM,
    out=None,
    activation: tuple | None = None,
) -> torch.Tensor:
    """Compute this rank's experts for x [T, hidden], where T > 0.

    Return the weighted sum of the experts' outputs in `out` [T, hidden]. `gate_up` [experts, 2 * size, hidden] and
    `down` [experts, hidden, size] are the weights of this rank's experts, from `first_expert` on. `norm` is (weight
    [hidden], eps) of an RMSNorm, which is applied to x first. All tensors are contiguous.
    """
    (num_tokens, top_k), kernels = routing.expert_ids.shape, (_gate_up_gemv_kernel, _down_gemv_kernel)
    tile = GATE_UP_TILE
    if isinstance(down, tuple):
        kernels, tile = (_scaled_gate_up_gemv_kernel, _scaled_down_gemv_kernel), SCALED_GATE_UP_TILE
    weight, constants = _operands(gate_up, tile, top_k)
    down_weight, down_constants = _operands(down, DOWN_TILE, top_k)
    hidden, size = down_weight[0].shape[1:]
    h = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if out is None else out
    grid = triton.cdiv(size, constants["SIZES"].tile_n), num_tokens * top_k
    launch(kernels[0], grid, x.device, shared=50)(
        (x, norm[0]), weight, routing.expert_ids, h, first_expert, norm[1], size, ACT=activation, **constants
    )
    grid = triton.cdiv(hidden, down_constants["SIZES"].tile_n), num_tokens
    launch(kernels[1], grid, x.device, shared=50)(
        h, down_weight, routing[:2], out, first_expert, hidden, **down_constants
    )
    return out

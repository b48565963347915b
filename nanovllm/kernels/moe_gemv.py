"""Mixture of experts for a few tokens: matrix-vector products with the weights of the experts that are chosen.

Both kernels are bound by the reading of weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.moe_routing import Routing

MAX_GEMV_TOKENS = 4  # with more tokens, several choose the same expert, whose weights a grouped product reads once
GATE_UP_TILE = 4, 1024, 4  # TILE_N, TILE_K and warps
DOWN_TILE = 2, 256, 1  # of several tokens; a warp alone has no barriers, and all its loads are in flight
DOWN_TILE_OF_ONE = 1, 256, 1


class Sizes(NamedTuple):
    """What the kernels are compiled for."""

    k: int
    num_local: int  # experts of this rank
    top_k: int
    tile_n: int
    tile_k: int


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _gate_up_gemv_kernel(
    x_ptr, norm_weight_ptr, w_ptr, ids_ptr, out_ptr, first_expert, eps, N, SIZES: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_and_wait(PDL)
    K: tl.constexpr = SIZES.k
    TILE_K: tl.constexpr = SIZES.tile_k
    pair = tl.program_id(1)
    token = pair // SIZES.top_k
    expert = tl.load(ids_ptr + pair) - first_expert
    if (expert < 0) | (expert >= SIZES.num_local):
        return
    n = tl.program_id(0) * SIZES.tile_n + tl.arange(0, SIZES.tile_n)
    k = tl.arange(0, TILE_K)
    gate_w = w_ptr + (expert.to(tl.int64) * 2 * N + n)[:, None] * K + k[None, :]
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
    y = y / (1.0 + tl.exp(-y)) * (tl.sum(up, 1) * scale)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), n < N)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    h_ptr, w_ptr, weights_ptr, ids_ptr, out_ptr, first_expert, N, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """The sum over a token's experts, all in one program."""
    K: tl.constexpr = SIZES.k
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
        w = w_ptr + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        for begin in tl.static_range(0, K, TILE_K):
            inside = begin + k < limit
            h = tl.load(h_ptr + pair * K + begin + k, inside, 0.0).to(tl.float32) * weight
            acc += tl.load(w + begin, (n < N)[:, None] & inside[None, :], 0.0).to(tl.float32) * h[None, :]
    tl.store(out_ptr + token * N + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), n < N)


def moe_gemv(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int = 0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's experts, of those that this rank has: x [T, hidden] -> [T, hidden]; T is not 0.

    `gate_up` [experts, 2 * size, hidden] and `down` [experts, hidden, size] are the weights of this rank's experts,
    from `first_expert` on. With a norm weight [hidden], the RMS norm of x takes its place. `out` takes the result. All
    contiguous.
    """
    (num_tokens, top_k), (num_local, hidden, size) = routing.expert_ids.shape, down.shape
    h = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if out is None else out
    tile_n, tile_k, num_warps = GATE_UP_TILE
    sizes = Sizes(hidden, num_local, top_k, tile_n, tile_k)
    launch(_gate_up_gemv_kernel, (triton.cdiv(size, tile_n), num_tokens * top_k), x.device, shared=50)(
        x, norm_weight, gate_up, routing.expert_ids, h, first_expert, eps, size, SIZES=sizes, num_warps=num_warps
    )
    tile_n, tile_k, num_warps = DOWN_TILE if num_tokens > 1 else DOWN_TILE_OF_ONE
    sizes = Sizes(size, num_local, top_k, tile_n, tile_k)
    launch(_down_gemv_kernel, (triton.cdiv(hidden, tile_n), num_tokens), x.device, shared=50)(
        h, down, *routing[:2], out, first_expert, hidden, SIZES=sizes, num_warps=num_warps
    )
    return out

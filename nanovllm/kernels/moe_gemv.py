"""Mixture of experts for a few tokens: matrix-vector products with the weights of the experts that are chosen.

Two kernels, the first of which also routes the tokens. Both are bound by the reading of weights.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.moe_routing import Routing, rank_experts, routing_weights

MAX_GEMV_TOKENS = 4  # with more tokens, several choose the same expert, whose weights a grouped product reads once
GATE_UP_TILE = 16, 256, 3  # TILE_N, TILE_K and STAGES of the loop over K
DOWN_TILE = 2, 256, 1  # TILE_N, TILE_K and warps: a warp alone has no barriers, and all its loads are in flight
SHARED = None  # see `launch`


@dependent_kernel()
@triton.jit(do_not_specialize=["part_size", "first_expert"])
def _gate_up_gemv_kernel(
    x_ptr,
    norm_weight_ptr,
    logits_ptr,
    w_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    part_size,
    first_expert,
    eps,
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    LOCAL_E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    token = pair // TOP_K
    # each program routes its token: that takes less time than another kernel
    logits, rank = rank_experts(logits_ptr + token * E, part_size, E, BLOCK_E, SPLIT_K)
    is_chosen = rank == pair % TOP_K
    expert = tl.sum(tl.where(is_chosen, tl.arange(0, BLOCK_E), 0), 0)
    if tl.program_id(0) == 0:
        weight = routing_weights(logits, rank, TOP_K, RENORMALIZE)
        tl.store(ids_ptr + pair, expert)
        tl.store(weights_ptr + pair, tl.sum(tl.where(is_chosen, weight, 0.0), 0))
    local_expert = expert - first_expert
    if (local_expert < 0) | (local_expert >= LOCAL_E):
        return
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    gate_w = w_ptr + (local_expert.to(tl.int64) * 2 * N + n)[:, None] * K + k[None, :]
    up_w = gate_w + N * K
    gate = tl.zeros([TILE_N, TILE_K], tl.float32)
    up = tl.zeros([TILE_N, TILE_K], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        x = tl.load(x_ptr + token * K + begin + k, begin + k < K, 0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_weight_ptr + begin + k, begin + k < K, 0.0).to(tl.float32)
        inside = (n < N)[:, None] & (begin + k < K)[None, :]
        gate += tl.load(gate_w + begin, inside, 0.0).to(tl.float32) * x[None, :]
        up += tl.load(up_w + begin, inside, 0.0).to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if HAS_NORM else 1.0
    y = tl.sum(gate, 1) * scale
    y = y / (1.0 + tl.exp(-y)) * (tl.sum(up, 1) * scale)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), n < N)


@dependent_kernel()
@triton.jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    h_ptr,
    w_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    first_expert,
    N,
    K: tl.constexpr,
    LOCAL_E: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum over a token's experts, all in one program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    acc = tl.zeros([TILE_N, TILE_K], tl.float32)
    for slot in tl.static_range(TOP_K):  # unrolled: the loads of several experts are in flight
        pair = token * TOP_K + slot
        weight = tl.load(weights_ptr + pair)
        expert = tl.load(ids_ptr + pair) - first_expert
        limit = tl.where((expert >= 0) & (expert < LOCAL_E), K, 0)  # other ranks have the other experts
        w = w_ptr + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        for begin in tl.static_range(0, K, TILE_K):
            inside = begin + k < limit
            h = tl.load(h_ptr + pair * K + begin + k, inside, 0.0).to(tl.float32) * weight
            acc += tl.load(w + begin, (n < N)[:, None] & inside[None, :], 0.0).to(tl.float32) * h[None, :]
    tl.store(out_ptr + token * N + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), n < N)


def gemv_gate_up(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    weight: torch.Tensor,
    first_expert: int = 0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, Routing]:
    """silu(x W_gate^T) * (x W_up^T) for each of a token's experts, [T * top_k, size], and the routing.

    See `moe_gemv`. Rows of experts that are on other ranks are not written.
    """
    (split_k, num_tokens, num_experts), (size, hidden) = logits.shape, (weight.shape[1] // 2, weight.shape[2])
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x.device)
    expert_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    h = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    tile_n, tile_k, stages = GATE_UP_TILE
    launch(_gate_up_gemv_kernel, (triton.cdiv(size, tile_n), num_tokens * top_k), x.device, shared=SHARED)(
        x,
        norm_weight,
        logits,
        weight,
        weights,
        expert_ids,
        h,
        num_tokens * num_experts,
        first_expert,
        eps,
        size,
        K=hidden,
        E=num_experts,
        LOCAL_E=len(weight),
        BLOCK_E=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        SPLIT_K=split_k,
        RENORMALIZE=renormalize,
        HAS_NORM=norm_weight is not None,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGES=stages,
        num_warps=4,
    )
    return h, Routing(weights, expert_ids, num_experts)


def gemv_down(
    h: torch.Tensor, weight: torch.Tensor, routing: Routing, first_expert: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weighted sum of h W^T over a token's experts: h [T * top_k, size] -> [T, hidden]; see `moe_gemv`."""
    (num_tokens, top_k), (_, hidden, size) = routing.weights.shape, weight.shape
    out = torch.empty((num_tokens, hidden), dtype=h.dtype, device=h.device) if out is None else out
    tile_n, tile_k, num_warps = DOWN_TILE
    launch(_down_gemv_kernel, (triton.cdiv(hidden, tile_n), num_tokens), h.device, shared=SHARED)(
        h,
        weight,
        routing.weights,
        routing.expert_ids,
        out,
        first_expert,
        hidden,
        K=size,
        LOCAL_E=len(weight),
        TOP_K=top_k,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=num_warps,
    )
    return out


def moe_gemv(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int = 0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's experts, of those that this rank has: x [T, hidden] -> [T, hidden]; T is not 0.

    `logits` [split_k, T, experts] are the router's, as partial sums. `gate_up` and `down` are the weights of this
    rank's experts, from `first_expert` on. With a norm weight [hidden], the RMS norm of x takes its place. `out` takes
    the result. All contiguous.
    """
    h, routing = gemv_gate_up(x, logits, top_k, renormalize, gate_up, first_expert, norm_weight, eps)
    return gemv_down(h, down, routing, first_expert, out)

"""Selects the kernels for a mixture of experts and for the norm before the router, by the number of tokens."""

from functools import partial

import torch

from nanovllm.kernels.linear.gemv import gemv
from nanovllm.kernels.linear.tiles import NO_NORM
from nanovllm.moe.kernels.moe_gemm import choose_tile_m, grouped_product, moe_gemm, sum_local_parts
from nanovllm.moe.kernels.moe_gemv import MAX_GEMV_TOKENS, moe_gemv
from nanovllm.moe.kernels.moe_routing import Routing, route, router_logits, sort_by_expert
from nanovllm.moe.kernels.packed_experts import grouped_packed_product, packed_experts
from nanovllm.quantization.kernels.packed_gemm import FEW_ROWS, packed_tiles


def mix_experts(x, layer, slot_mapping):
    if len(x) == 0:
        return NotImplemented
    by_gemv = len(x) <= MAX_GEMV_TOKENS and layer.gate.bias is None and suits_gemv(layer.experts)
    return _by_gemv(x, layer, slot_mapping) if by_gemv else mix_by_gemm(x, layer, slot_mapping)


def choose_experts(x, weight, top_k, factors, slot_mapping, router=router_logits):
    if len(x) == 0:
        return NotImplemented
    return route(router(x, weight), top_k, True, slot_mapping, factors=factors)[:2]


def sum_experts(x, experts, weights, expert_ids):
    """Compute `Experts.forward` for x [T, hidden]. The weights and expert ids may come from any router."""
    if len(x) == 0:
        return NotImplemented
    if len(x) > MAX_GEMV_TOKENS or not suits_gemv(experts):
        return sum_by_gemm(x, experts, weights, expert_ids)
    routing = Routing(weights, expert_ids.int(), experts.num_experts)
    stacks, first, activation = experts.format.stacks(experts), experts.first_expert, experts.activation
    return moe_gemv(x, routing, *stacks, first, activation=activation)


def sum_by_gemm(x, experts, weights, expert_ids, packed=packed_experts):
    routing = Routing(weights, expert_ids.int(), experts.num_experts)
    return sum_local_parts(_parts(x, routing, experts, packed), routing, experts.first_expert, experts.num_stacked)


def expert_linear(x, experts, name, expert_ids):
    """Multiply each row of x [P, inputs] by its expert's weight.

    The result equals that of the second GEMM of moe_gemm.py with `top_k` = 1.
    """
    if len(x) == 0:
        return NotImplemented
    is_down, form = name == "down_proj", experts.format
    weight, bias = form.stacks(experts)[is_down], experts.down_proj_bias if is_down else experts.gate_up_proj_bias
    routing = Routing(x.new_ones(len(x), 1, dtype=torch.float32), expert_ids.int()[:, None], experts.num_experts)
    tile_m = choose_tile_m(len(x), experts.num_experts, form.is_scaled)
    if form.is_packed:
        tiles = packed_tiles(len(x) if len(x) <= FEW_ROWS else tile_m)
        tile_m = tiles.tile_m
    rows = sort_by_expert(routing.expert_ids, experts.first_expert, experts.num_local, tile_m)
    x = x[rows.pairs.clamp(0, len(x) - 1)]  # the last pairs are unwritten if other ranks have their experts
    out = x.new_zeros(1, len(x), experts.hidden_size if is_down else 2 * experts.local_size)
    if form.is_packed:
        return grouped_packed_product(x, weight, bias, rows, routing, tiles, out)[0]
    return grouped_product(x, weight, bias, rows, routing, out, form.quantizes_activations)[0]


def suits_gemv(experts) -> bool:
    return experts.gate_up_proj_bias is None and not experts.format.is_packed


def _parts(rows, routing, experts, packed):
    """Compute the results [top_k, T, hidden] of each token's experts with grouped GEMMs.

    `packed` is the function for 4-bit weights.
    """
    stacks, first = experts.format.stacks(experts), experts.first_expert
    terms = (experts.gate_up_proj_bias, experts.down_proj_bias), experts.activation
    if experts.format.is_packed:
        return packed(rows, routing, *stacks, first, *terms)
    return moe_gemm(rows, routing, *stacks, first, experts.format.quantizes_activations, *terms)


def _by_gemv(x, layer, slot_mapping):
    """Compute the experts with matrix-vector kernels.

    For a single row, the matrix-vector kernels also compute the norm. If the weights have 8 bits, another kernel
    computes the norm for the experts (scaled_gemv.py explains why).
    """
    gate, experts = layer.gate.weight, layer.experts
    summands = x.summands() if len(x) == 1 else None
    if summands is not None:
        row, residual = summands
        logits = row.new_empty((1, 1, len(gate)), dtype=torch.float32)
        _, x.total = gemv(row, gate, (x.weight, x.eps), residual, out=logits[0])
    else:
        logits = router_logits(x.tensor(), gate)
    routing = route(logits, layer.top_k, layer.renormalize, slot_mapping, layer.num_shared)
    weights, first = experts.format.stacks(experts), experts.first_expert

    if summands is None or experts.format.is_scaled:
        rows, norm = x.tensor(), NO_NORM
    else:
        rows, norm = x.total, (x.weight, x.eps)

    def compute(out):  # [1, T, hidden] or None; kernels treat it as [T, hidden]
        return moe_gemv(rows, routing, *weights, first, norm, out, experts.activation)

    return layer.sum_over_ranks(compute, *rows.shape, rows.dtype)


def mix_by_gemm(x, layer, slot_mapping, router=router_logits, packed=packed_experts):
    """Compute the experts with grouped GEMMs.

    On a single rank, the next norm adds the `top_k` results of each token.
    """
    experts, tp, rows = layer.experts, layer.tp, x.tensor()
    logits = router(rows, layer.gate.weight)
    routing = route(logits, layer.top_k, layer.renormalize, slot_mapping, layer.num_shared, layer.gate.bias)
    parts = _parts(rows, routing, experts, packed)
    if tp.size == 1:
        return layer.sum_over_ranks(lambda out: parts.squeeze(0), *rows.shape, rows.dtype, len(parts))
    compute = partial(sum_local_parts, parts, routing, experts.first_expert, experts.num_stacked)
    return layer.sum_over_ranks(compute, *rows.shape, rows.dtype)

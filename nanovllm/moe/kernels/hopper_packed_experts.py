"""Grouped GEMMs for experts with 4-bit weights, written in Gluon for Hopper. Any number of tokens is supported.

hopper_packed_gemm.py explains how a program multiplies. In this file, a tile contains rows of one expert.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.activations import Activation
from nanovllm.kernels.hopper.hopper_ring import gdc_launch_dependents, gdc_wait, outputs_of, tiles_of
from nanovllm.kernels.hopper.hopper_tiles import SMALL_TILE_M, packed_expert_tile
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.moe.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing
from nanovllm.quantization.kernels.hopper_packed_gemm import (
    BLOCK,
    LOADING_REGISTERS,
    OUTPUTS,
    ROWS,
    WORDS_OF_BLOCK,
    allocate,
    load_blocks,
    load_words,
    multiply_blocks,
    plan_of,
    store_rows,
)


class ExpertsPlan(NamedTuple):
    top_k: int
    first_expert: int
    num_experts: int  # of this rank
    is_single: bool  # whether there is one token, so that each pair is a tile, and no table of tiles exists
    is_last: bool  # whether results are multiplied by routing weights, and stored in the order of pairs


@gluon.jit
def _tile(routing_ptrs, EXPERTS: gl.constexpr):
    """Return a program's expert, and its first row and end row. Without an expert, return -1 and no rows."""
    _, ids_ptr, _, table_ptr = routing_ptrs
    tile = gl.program_id(1)
    if EXPERTS.is_single:
        expert = gl.load(ids_ptr + tile) - EXPERTS.first_expert
        expert, first_row, end_row = gl.where(expert < EXPERTS.num_experts, expert, -1), tile, tile + 1
    else:
        field = table_ptr + tile * TILE_FIELDS
        expert, first_row, end_row = gl.load(field), gl.load(field + 1), gl.load(field + 2)
    return expert, gl.where(expert < 0, 0, first_row), gl.where(expert < 0, 0, end_row)


@gluon.jit
def _pairs(rows, end_row, routing_ptrs, EXPERTS: gl.constexpr):
    return rows if EXPERTS.is_single else gl.load(routing_ptrs[2] + rows, rows < end_row, 0)


@gluon.jit
def _store(out_ptr, y, routing_ptrs, first, num_outputs, rows_of_tile, num_tokens, PLAN, EXPERTS: gl.constexpr):
    """Store a warpgroup's results y [outputs, tokens] of the rows of a tile, from output `first` on."""
    first_row, end_row = rows_of_tile
    TOKENS: gl.constexpr = y.shape[1]
    if EXPERTS.is_last:
        row = first_row + gl.arange(0, TOKENS, gl.SliceLayout(0, y.type.layout))
        pair = _pairs(row, end_row, routing_ptrs, EXPERTS)
        y *= gl.load(routing_ptrs[0] + pair, row < end_row, 0.0)[None, :]
    y = y.to(out_ptr.dtype.element_ty)
    if not PLAN.is_sync:  # store more outputs at a time
        y = gl.convert_layout(y.permute((1, 0)), outputs_of(TOKENS)).permute((1, 0))
    row = first_row + gl.arange(0, TOKENS, gl.SliceLayout(0, y.type.layout))
    out_row = row
    if EXPERTS.is_last:
        pair = _pairs(row, end_row, routing_ptrs, EXPERTS)
        out_row = pair % EXPERTS.top_k * num_tokens + pair // EXPERTS.top_k
    store_rows(out_ptr, y, out_row, row < end_row, first, num_outputs)


@gluon.jit
def _multiply(pointers, rings, sharing, at, sizes, G: gl.constexpr, PLAN: gl.constexpr, EXPERTS: gl.constexpr):
    """Run a multiplying warpgroup."""
    w_ptrs, bias_ptr, routing_ptrs, out_ptr = pointers
    first, output, rows_of_tile = at
    steps, num_tokens, num_outputs = sizes
    rows = first + output, first + num_outputs, num_outputs
    y = multiply_blocks(rings, sharing, w_ptrs, bias_ptr, rows, (0, steps), G, PLAN)
    if PLAN.row_groups > G:
        _store(out_ptr, y, routing_ptrs, output + G * ROWS, num_outputs, rows_of_tile, num_tokens, PLAN, EXPERTS)


@dependent_kernel()
@gluon.jit(do_not_specialize=["num_tokens"])
def _packed_experts_kernel(
    words_tiles,
    x_tiles,
    w_ptrs,
    bias_ptr,
    routing_ptrs,
    out_ptr,
    num_tokens,
    num_outputs,
    PLAN: gl.constexpr,
    EXPERTS: gl.constexpr,
    PDL: gl.constexpr,
):
    # A program computes some outputs of a tile of rows. Tiles without an expert have no steps.
    gdc_launch_dependents(PDL)
    rings, sharing = allocate(words_tiles, x_tiles, PLAN)
    gdc_wait(PDL)
    expert, first_row, end_row = _tile(routing_ptrs, EXPERTS)
    BURST: gl.constexpr = WORDS_OF_BLOCK * PLAN.burst
    steps = gl.where(expert < 0, 0, (PLAN.weight.words + BURST - 1) // BURST)
    TILE: gl.constexpr = OUTPUTS if PLAN.is_gated else PLAN.row_groups * ROWS
    output = gl.program_id(0) * TILE
    first = gl.maximum(expert, 0) * (2 * num_outputs if PLAN.is_gated else num_outputs)
    row = first + output
    for i in range(gl.minimum(steps, PLAN.stages)):
        load_words(i, words_tiles, rings, row, row + num_outputs, 0, PLAN)
    x_row = first_row
    if EXPERTS.is_single and not EXPERTS.is_last:
        x_row = 0
    pointers, sizes = (w_ptrs, bias_ptr, routing_ptrs, out_ptr), (steps, num_tokens, num_outputs)
    at = first, output, (first_row, end_row)
    load_at = row, row + num_outputs, x_row, 0
    gl.warp_specialize(
        [
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(0), PLAN, EXPERTS)),
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(1), PLAN, EXPERTS)),
            (load_blocks, ((words_tiles, x_tiles), rings, load_at, steps, PLAN)),
        ],
        [4, 1],  # warps of the second and the third partition
        [PLAN.registers, LOADING_REGISTERS],
    )


def packed_rows(
    x: torch.Tensor,
    weight,
    bias: torch.Tensor | None,
    rows: ExpertRows | None,
    routing: Routing,
    first_expert: int,
    out: torch.Tensor,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Multiply each row of x by its expert's weight, add the expert's bias, and store the result in `out`.

    x [rows, K] has 16 bits. The rows of x are in the order of `rows`. If there is one token, `rows` is None, and x has
    a row for each of the token's experts, or a single row for all of them. `weight` is a stack of Packed weights
    [experts, N, K] with contiguous groups. If `out` is [top_k, T, N], results are multiplied by the routing weights. If
    `out` is [rows, N], the routing weights are not used. If there is an activation, tiles have 8 rows, and `out` is
    [rows, N / 2].
    """
    (num_tokens, top_k), n, is_last = routing.weights.shape, out.shape[-1], out.dim() == 3
    pairs, table, tile_m = (None, None, SMALL_TILE_M) if rows is None else rows
    num_tiles, num_rows = top_k if rows is None else len(table), n if activation is None else 2 * n
    tile = packed_expert_tile(tile_m, num_tiles, num_rows, num_sms(x.device))
    pointers, plan = plan_of(weight, x.dtype, tile, activation)
    experts = ExpertsPlan(top_k, first_expert, len(weight.words), rows is None, is_last)
    box, tile_n = (ROWS.value, tile.outputs) if activation is None else (OUTPUTS.value, OUTPUTS.value)
    words_tiles = tiles_of(weight.words.flatten(0, 1), box, WORDS_OF_BLOCK.value)
    x_tiles = tiles_of(x, tile.rows, BLOCK.value // 2)
    routing_ptrs = routing.weights, routing.expert_ids, pairs, table
    launch(_packed_experts_kernel, (triton.cdiv(n, tile_n), num_tiles), x.device)(
        *(words_tiles, x_tiles, pointers, bias, routing_ptrs, out, num_tokens, n),
        **dict(PLAN=plan, EXPERTS=experts, num_warps=4, maxnreg=tile.registers),
    )
    return out

"""Grouped GEMMs for experts with 4-bit weights, written in Gluon for Hopper. Any number of tokens is supported.

hopper_packed_gemm.py explains how a program multiplies. In this file, a tile contains rows of one expert.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.hopper.hopper_ring import gdc_launch_dependents, gdc_wait, outputs_of, tiles_of
from nanovllm.kernels.hopper.hopper_tiles import packed_expert_tile
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.launch.gpu_features import num_sms
from nanovllm.moe.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing
from nanovllm.quantization.kernels.hopper_packed_gemm import (
    BLOCK,
    LOADING_REGISTERS,
    ROWS,
    WORDS_OF_BLOCK,
    allocate,
    load_blocks,
    load_words,
    multiply_blocks,
    plan_of,
)


class ExpertsPlan(NamedTuple):
    top_k: int
    is_single: bool  # all rows share the only row of x
    is_last: bool  # whether results are multiplied by routing weights, and stored in the order of pairs


@gluon.jit
def _store_rows(out_ptr, sums, routing_ptrs, row, num_rows, rows_of_tile, num_tokens, EXPERTS: gl.constexpr):
    """Store a warpgroup's sums [64, tokens], which are outputs `row` to `row + 63` of each row of x in the tile."""
    weights_ptr, pairs_ptr = routing_ptrs
    first_row, end_row = rows_of_tile
    TOKENS: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = outputs_of(TOKENS)
    if EXPERTS.is_last:
        in_sums = first_row + gl.arange(0, TOKENS, gl.SliceLayout(0, sums.type.layout))
        pair = gl.load(pairs_ptr + in_sums, in_sums < end_row, 0)
        sums *= gl.load(weights_ptr + pair, in_sums < end_row, 0.0)[None, :]
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty).permute((1, 0)), LAYOUT)
    out_row = first_row + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    is_row = out_row < end_row
    if EXPERTS.is_last:
        pair = gl.load(pairs_ptr + out_row, is_row, 0)
        out_row = pair % EXPERTS.top_k * num_tokens + pair // EXPERTS.top_k
    n = row + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    at = out_ptr + out_row.to(gl.int64)[:, None] * num_rows + n[None, :]
    gl.store(at, out, is_row[:, None] & (n < num_rows)[None, :])


@gluon.jit
def _multiply(pointers, rings, sharing, at, sizes, G: gl.constexpr, PLAN: gl.constexpr, EXPERTS: gl.constexpr):
    """Run a multiplying warpgroup."""
    w_ptrs, bias_ptr, routing_ptrs, out_ptr = pointers
    expert, row, rows_of_tile = at
    steps, num_tokens, num_rows = sizes
    first, end = expert * num_rows, (expert + 1) * num_rows
    sums = multiply_blocks(rings, sharing, w_ptrs, first + row, end, (0, steps), G, PLAN)
    if PLAN.row_groups > G:
        if bias_ptr is not None:
            n = first + row + G * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, sums.type.layout))
            sums += gl.load(bias_ptr + n, n < end, 0.0).to(gl.float32)[:, None]
        _store_rows(out_ptr, sums, routing_ptrs, row + G * ROWS, num_rows, rows_of_tile, num_tokens, EXPERTS)


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
    num_rows,
    PLAN: gl.constexpr,
    EXPERTS: gl.constexpr,
    PDL: gl.constexpr,
):
    # A program computes some outputs of a tile of rows. Tiles without an expert have no steps.
    gdc_launch_dependents(PDL)
    rings, sharing = allocate(words_tiles, x_tiles, PLAN)
    gdc_wait(PDL)
    weights_ptr, pairs_ptr, table_ptr = routing_ptrs
    field = table_ptr + gl.program_id(1) * TILE_FIELDS
    expert, first_row, end_row = gl.load(field), gl.load(field + 1), gl.load(field + 2)
    # Without an expert, the other fields are arbitrary
    steps = gl.where(expert < 0, 0, (PLAN.weight.words + WORDS_OF_BLOCK - 1) // WORDS_OF_BLOCK)
    first_row, end_row = gl.where(expert < 0, 0, first_row), gl.where(expert < 0, 0, end_row)
    expert = gl.maximum(expert, 0)
    row = gl.program_id(0) * (PLAN.row_groups * ROWS)
    w_row = expert * num_rows + row
    for i in range(gl.minimum(steps, PLAN.stages)):
        load_words(i, words_tiles, rings, w_row, 0, PLAN)
    x_row = first_row
    if EXPERTS.is_single:
        x_row = 0
    pointers = w_ptrs, bias_ptr, (weights_ptr, pairs_ptr), out_ptr
    at, sizes = (expert, row, (first_row, end_row)), (steps, num_tokens, num_rows)
    gl.warp_specialize(
        [
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(0), PLAN, EXPERTS)),
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(1), PLAN, EXPERTS)),
            (load_blocks, ((words_tiles, x_tiles), rings, (w_row, x_row, 0), steps, PLAN)),
        ],
        [4, 1],  # warps of the second and the third partition
        [PLAN.registers, LOADING_REGISTERS],
    )


def packed_rows(
    x: torch.Tensor, weight, bias: torch.Tensor | None, rows: ExpertRows, routing: Routing, out: torch.Tensor
) -> torch.Tensor:
    """Multiply each row of x by its expert's weight, add the expert's bias, and store the result in `out`.

    x [rows, K] has 16 bits. The rows of x are in the order of `rows`. If x has a single row, all pairs use this row.
    `weight` is a stack of Packed weights [experts, N, K] with contiguous groups. If `out` is [top_k, T, N], results are
    multiplied by the routing weights. If `out` is [rows, N], the routing weights are not used.
    """
    (num_tokens, top_k), n = routing.weights.shape, out.shape[-1]
    tile = packed_expert_tile(rows.tile_m, len(rows.table), n, num_sms(x.device))
    pointers, plan = plan_of(weight, x.dtype, tile)
    experts = ExpertsPlan(top_k, len(x) == 1 < len(rows.pairs), out.dim() == 3)
    words_tiles = tiles_of(weight.words.flatten(0, 1), ROWS.value, WORDS_OF_BLOCK.value)
    x_tiles = tiles_of(x, tile.rows, BLOCK.value // 2)
    routing_ptrs = routing.weights, rows.pairs, rows.table
    launch(_packed_experts_kernel, (triton.cdiv(n, tile.outputs), len(rows.table)), x.device)(
        *(words_tiles, x_tiles, pointers, bias, routing_ptrs, out, num_tokens, n),
        **dict(PLAN=plan, EXPERTS=experts, num_warps=4, maxnreg=tile.registers),
    )
    return out

"""Mixture of experts for many tokens, with weights of 8-bit values times scales; as moe_gemm.py for other weights.

As in scaled_gemm.py, the products are those of e4m3 where there are FP8 units, for which the inputs of both products
are quantized before. Elsewhere weights are converted to the dtype of x.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, has_tma, launch
from nanovllm.kernels.moe_gemm import (
    GROUP_M,
    Tiles,
    choose_tile_m,
    load_row_tile,
    load_tile,
    tile_descriptor,
    tile_of_program,
)
from nanovllm.kernels.moe_routing import ExpertRows, Routing, sort_by_expert
from nanovllm.kernels.quantize_rows import quantize_rows
from nanovllm.kernels.scaled_gemm import QuantizedRows, group_size, tensors_of
from nanovllm.kernels.scaled_tiles import as_loadable, block_shape, dot_values, scales_of_rows, scales_of_x

TILE_K = 128
# by TILE_M; in GATE_UP, tile_n outputs need twice as many rows of weights. While a program multiplies its products by
# scales, it leaves the tensor cores to others on the same multiprocessor. With a larger TILE_M registers would spill.
MAX_TILE_M = 64
GATE_UP = {16: Tiles(64, TILE_K, 4, 4), 32: Tiles(64, TILE_K, 3, 4), 64: Tiles(64, TILE_K, 4, 4)}
DOWN = {16: Tiles(128, TILE_K, 4, 4), 32: Tiles(128, TILE_K, 3, 4), 64: Tiles(128, TILE_K, 3, 4)}


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tiles", "x_scale_stride"])
def _scaled_gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_tiles,
    scale_ptr,
    pairs_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    x_scale_stride,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, first_n = tile_of_program(num_tiles, N, TILE_N, GROUP_M)
    expert, first_row, end_row = load_row_tile(table_ptr, tile)
    if expert < 0:
        return
    COLUMNS: tl.constexpr = K // BLOCK_K
    row = first_row + tl.arange(0, TILE_M)
    is_used = row < end_row
    token = tl.load(pairs_ptr + row, is_used, 0) // TOP_K
    k = tl.arange(0, TILE_K)
    x = x_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
    gate_row = expert * 2 * N + first_n
    up_row = gate_row + N
    end_gate = expert * 2 * N + N
    end_up = end_gate + N
    n = first_n + tl.arange(0, TILE_N)
    gate = tl.zeros([TILE_N, TILE_M], tl.float32)
    up = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        # weights first: they do not wait for `token`
        gate_w = load_tile(w_tiles, w_ptr, gate_row, begin, n < N, K, TILE_N, TILE_K, TMA)
        up_w = load_tile(w_tiles, w_ptr, up_row, begin, n < N, K, TILE_N, TILE_K, TMA)
        x_tile = tl.load(x + begin, is_used[:, None] & (begin + k < K)[None, :], 0.0)
        gate_product = dot_values(gate_w, x_tile.T, PRECISION)
        up_product = dot_values(up_w, x_tile.T, PRECISION)
        if X_GROUP < K:
            x_scale = scales_of_x(x_scale_ptr, begin, token, is_used, x_scale_stride, X_GROUP)
            gate_product *= x_scale
            up_product *= x_scale
        if COLUMNS > 1:
            column_ptr = scale_ptr + begin // BLOCK_K
            gate_product *= scales_of_rows(column_ptr, gate_row, end_gate, COLUMNS, BLOCK_N, TILE_N)
            up_product *= scales_of_rows(column_ptr, up_row, end_up, COLUMNS, BLOCK_N, TILE_N)
        gate += gate_product
        up += up_product
    if X_GROUP == K:
        x_scale = scales_of_x(x_scale_ptr, 0, token, is_used, x_scale_stride, X_GROUP)
        gate *= x_scale
        up *= x_scale
    if COLUMNS == 1:
        gate *= scales_of_rows(scale_ptr, gate_row, end_gate, COLUMNS, BLOCK_N, TILE_N)
        up *= scales_of_rows(scale_ptr, up_row, end_up, COLUMNS, BLOCK_N, TILE_N)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + n[None, :], y.T, is_used[:, None] & (n < N)[None, :])


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tiles", "num_tokens", "h_scale_stride"])
def _scaled_down_kernel(
    h_ptr,
    h_tiles,
    h_scale_ptr,
    w_ptr,
    w_tiles,
    scale_ptr,
    weights_ptr,
    pairs_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    num_tokens,
    h_scale_stride,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, first_n = tile_of_program(num_tiles, N, TILE_N, GROUP_M)
    expert, first_row, end_row = load_row_tile(table_ptr, tile)
    if expert < 0:
        return
    COLUMNS: tl.constexpr = K // BLOCK_K
    row = first_row + tl.arange(0, TILE_M)
    is_used = row < end_row
    # loaded before the products and needed after them
    pair = tl.load(pairs_ptr + row, is_used, 0)
    weight = tl.load(weights_ptr + pair, is_used, 0.0)
    n = first_n + tl.arange(0, TILE_N)
    w_row = expert * N + first_n
    end_w = expert * N + N
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        h = load_tile(h_tiles, h_ptr, first_row, begin, is_used, K, TILE_M, TILE_K, TMA)
        w = load_tile(w_tiles, w_ptr, w_row, begin, n < N, K, TILE_N, TILE_K, TMA)
        product = dot_values(w, h.T, PRECISION)
        if X_GROUP < K:
            product *= scales_of_x(h_scale_ptr, begin, row, is_used, h_scale_stride, X_GROUP)
        if COLUMNS > 1:
            product *= scales_of_rows(scale_ptr + begin // BLOCK_K, w_row, end_w, COLUMNS, BLOCK_N, TILE_N)
        acc += product
    if X_GROUP == K:
        acc *= scales_of_x(h_scale_ptr, 0, row, is_used, h_scale_stride, X_GROUP)
    if COLUMNS == 1:
        acc *= scales_of_rows(scale_ptr, w_row, end_w, COLUMNS, BLOCK_N, TILE_N)
    y = (acc * weight[None, :]).to(out_ptr.dtype.element_ty)
    out_row = (pair % TOP_K).to(tl.int64) * num_tokens + pair // TOP_K
    tl.store(out_ptr + out_row[:, None] * N + n[None, :], y.T, is_used[:, None] & (n < N)[None, :])


def _options(
    tiles: Tiles, rows: ExpertRows, x: torch.Tensor | QuantizedRows, values: torch.Tensor, scales: torch.Tensor
) -> dict[str, Any]:
    """The launch options that both products share."""
    k, (block_n, block_k) = values.shape[-1], block_shape(values, scales)
    use_tma = has_tma(values.device) and k % 16 == 0 and x.dtype != torch.float32
    return dict(
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        X_GROUP=group_size(x, k),
        TILE_M=rows.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k if block_k == k else min(tiles.tile_k, block_k & -block_k),
        STAGES=tiles.stages if use_tma else 2,  # other GPUs may have 99 KB of shared memory
        GROUP_M=GROUP_M,
        TMA=use_tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )


def scaled_moe_gemm(
    x: torch.Tensor,
    routing: Routing,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    first_expert: int = 0,
    quantize: bool = False,
) -> torch.Tensor:
    """`moe_gemm` with weights of values [experts, N, K] and scales [experts, N / block rows, K / block columns].

    Blocks have at least 32 columns. With `quantize`, the products are those of e4m3.
    """
    (num_tokens, top_k), (num_local, hidden, size) = routing.weights.shape, down[0].shape
    tile_m = min(MAX_TILE_M, choose_tile_m(routing.expert_ids.numel(), routing.num_experts))
    rows = sort_by_expert(routing.expert_ids, first_expert, num_local, tile_m)
    h = torch.empty((len(rows.pairs), size), dtype=x.dtype, device=x.device)
    out = torch.empty((top_k, num_tokens, hidden), dtype=x.dtype, device=x.device)

    values = as_loadable(gate_up[0])
    inputs = quantize_rows(x, block_shape(*gate_up)[1]) if quantize else x
    options = _options(GATE_UP[tile_m], rows, inputs, values, gate_up[1])
    elements, x_scales, stride = tensors_of(inputs)
    launch(_scaled_gate_up_kernel, (len(rows.table) * triton.cdiv(size, options["TILE_N"]),), x.device)(
        elements,
        x_scales,
        values,
        tile_descriptor(values.flatten(0, 1), options["TILE_N"], options),
        gate_up[1],
        rows.pairs,
        rows.table,
        h,
        len(rows.table),
        stride,
        size,
        TOP_K=top_k,
        **options,
    )
    values = as_loadable(down[0])
    inputs = quantize_rows(h, block_shape(*down)[1]) if quantize else h
    options = _options(DOWN[tile_m], rows, inputs, values, down[1])
    elements, h_scales, stride = tensors_of(inputs)
    launch(_scaled_down_kernel, (len(rows.table) * triton.cdiv(hidden, options["TILE_N"]),), x.device)(
        elements,
        tile_descriptor(elements, tile_m, options),
        h_scales,
        values,
        tile_descriptor(values.flatten(0, 1), options["TILE_N"], options),
        down[1],
        routing.weights,
        rows.pairs,
        rows.table,
        out,
        len(rows.table),
        num_tokens,
        stride,
        hidden,
        TOP_K=top_k,
        **options,
    )
    return out

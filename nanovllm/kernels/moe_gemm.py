"""Mixture of experts for many tokens: grouped products over rows that are sorted by expert (moe_routing.py).

Weights may be 8-bit values times scales. As in scaled_gemm.py, the products are those of e4m3 where there are FP8
units, for which the inputs of both products are quantized before; elsewhere weights are converted to the dtype of x.

Each token's `top_k` parts of the output are stored apart, for the next norm to add up: rows in the order of experts
could be added to their tokens only by atomic additions, in an order that would change from run to run.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, has_tma, launch
from nanovllm.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing, sort_by_expert
from nanovllm.kernels.quantize_rows import quantize_rows
from nanovllm.kernels.scaled_gemm import QuantizedRows, group_size, tensors_of
from nanovllm.kernels.tiles import (
    Tiles,
    as_loadable,
    block_shape,
    dot_values,
    load_tile,
    scales_of_rows,
    scales_of_x,
)

GROUP_M = 4  # tiles of rows that take the same tile of weights one after the other, which is then in the L2 cache


class ProductTiles(NamedTuple):
    gate_up: Tiles  # tile_n outputs need twice as many rows of weights
    down: Tiles


# by TILE_M, for elements of two bytes; where weights are the bound, two programs fit on a multiprocessor, so that one
# reads while the other begins or ends
TILES = {
    16: ProductTiles(Tiles(64, 128, 3, 4), Tiles(128, 128, 3, 4)),
    32: ProductTiles(Tiles(64, 64, 5, 4), Tiles(128, 64, 5, 4)),
    64: ProductTiles(Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4)),
    128: ProductTiles(Tiles(128, 64, 4, 8), Tiles(128, 64, 3, 4)),
}
# for 8-bit values; while a program multiplies its products by scales, it leaves the tensor cores to others on the same
# multiprocessor. With a larger TILE_M registers would spill.
MAX_SCALED_TILE_M = 64
SCALED_TILES = {
    16: ProductTiles(Tiles(64, 128, 4, 4), Tiles(128, 128, 4, 4)),
    32: ProductTiles(Tiles(64, 128, 3, 4), Tiles(128, 128, 3, 4)),
    64: ProductTiles(Tiles(64, 128, 4, 4), Tiles(128, 128, 3, 4)),
}
FLOAT32 = Tiles(32, 16, 3, 4)  # without tensor cores, for tests: larger tiles exceed the registers


def choose_tile_m(num_pairs: int, num_experts: int) -> int:
    """TILE_M: about one and a half times an expert's mean number of rows, as each tile reads the expert's weights."""
    return next((size for size in (16, 32, 64) if 2 * size * num_experts >= 3 * num_pairs), 128)


@triton.jit
def tile_of_program(num_tiles, N, TILE_N: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's tile of rows and first output: GROUP_M tiles of rows take a tile of outputs after each other."""
    tiles_per_group = GROUP_M * tl.cdiv(N, TILE_N)
    first_tile = tl.program_id(0) // tiles_per_group * GROUP_M
    group_size = tl.minimum(num_tiles - first_tile, GROUP_M)
    index = tl.program_id(0) % tiles_per_group
    return first_tile + index % group_size, index // group_size * TILE_N


@triton.jit
def load_row_tile(table_ptr, tile):
    """A tile's expert, or -1; its first row, and the row after its last."""
    field = table_ptr + tile * TILE_FIELDS
    return tl.load(field), tl.load(field + 1), tl.load(field + 2)


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tiles", "x_scale_stride"])
def _gate_up_kernel(
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
    # transposed, as in split_k_gemm.py
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
def _down_kernel(
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


def tile_descriptor(matrix: torch.Tensor, num_rows: int, options: dict[str, Any]) -> TensorDescriptor | None:
    """A TMA descriptor of tiles of `num_rows` rows; None on GPUs without TMA."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, options["TILE_K"]]) if options["TMA"] else None


def _options(
    tiles: Tiles, rows: ExpertRows, x: torch.Tensor | QuantizedRows, values: torch.Tensor, scales: torch.Tensor | None
) -> dict[str, Any]:
    """The launch options that both products share."""
    k, (block_n, block_k) = values.shape[-1], block_shape(values, scales)
    is_plain, is_float32 = scales is None, x.dtype == torch.float32
    tiles = FLOAT32 if is_plain and is_float32 else tiles
    use_tma = has_tma(values.device) and k * values.element_size() % 16 == 0 and (is_plain or not is_float32)
    max_stages = tiles.stages if use_tma else 3 if is_plain else 2  # other GPUs may have 99 KB of shared memory
    return dict(
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        X_GROUP=group_size(x, k),
        TILE_M=rows.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k if block_k == k else min(tiles.tile_k, block_k & -block_k),
        STAGES=min(max_stages, tiles.stages),
        GROUP_M=GROUP_M,
        TMA=use_tma,
        PRECISION="ieee" if is_float32 else "tf32",
        num_warps=tiles.warps,
    )


def moe_gemm(
    x: torch.Tensor,
    routing: Routing,
    gate_up: tuple[torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor | None],
    first_expert: int = 0,
    quantize: bool = False,
) -> torch.Tensor:
    """x [T, hidden] -> [top_k, T, hidden], whose sum over the slots is the output; T is not 0.

    `gate_up` and `down` are the weights [experts, N, K] of this rank's experts, from `first_expert` on, each with None,
    or values with scales [experts, N / block rows, K / block columns], of at least 32 columns. With `quantize`, the
    products are those of e4m3. Parts of tokens whose experts are on other ranks are not written. All contiguous, rows
    of a multiple of 16 bytes.
    """
    (num_tokens, top_k), (num_local, hidden, size) = routing.weights.shape, down[0].shape
    tile_m = choose_tile_m(routing.expert_ids.numel(), routing.num_experts)
    tiles = TILES
    if gate_up[1] is not None:
        tile_m, tiles = min(MAX_SCALED_TILE_M, tile_m), SCALED_TILES
    rows = sort_by_expert(routing.expert_ids, first_expert, num_local, tile_m)
    h = torch.empty((len(rows.pairs), size), dtype=x.dtype, device=x.device)
    out = torch.empty((top_k, num_tokens, hidden), dtype=x.dtype, device=x.device)

    values = as_loadable(gate_up[0])
    inputs = quantize_rows(x, block_shape(*gate_up)[1]) if quantize else x
    options = _options(tiles[tile_m].gate_up, rows, inputs, values, gate_up[1])
    elements, x_scales, stride = tensors_of(inputs)
    launch(_gate_up_kernel, (len(rows.table) * triton.cdiv(size, options["TILE_N"]),), x.device)(
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
    options = _options(tiles[tile_m].down, rows, inputs, values, down[1])
    elements, h_scales, stride = tensors_of(inputs)
    launch(_down_kernel, (len(rows.table) * triton.cdiv(hidden, options["TILE_N"]),), x.device)(
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

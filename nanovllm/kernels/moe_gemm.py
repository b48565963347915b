"""Mixture of experts for many tokens: grouped products over rows that are sorted by expert (moe_routing.py).

Weights may be 8-bit values times scales. Then as in scaled_gemm.py, the products are those of e4m3 where there are FP8
units, for which the inputs of both products are quantized before; elsewhere weights are converted to the dtype of x.

Each token's `top_k` parts of the output are stored apart, for the next norm to add up: rows in the order of experts
could be added to their tokens only by atomic additions, in an order that would change from run to run.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, has_tma, launch
from nanovllm.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing, sort_by_expert
from nanovllm.kernels.quantize_rows import quantize_rows
from nanovllm.kernels.tiles import (
    Tiles,
    add_product,
    as_loadable,
    block_shape,
    group_size,
    load_tile,
    tensors_of,
    times_scales,
)

GROUP_M = 4  # tiles of rows that take the same tile of weights one after the other, which is then in the L2 cache


# by TILE_M, for elements of two bytes; where weights are the bound, two programs fit on a multiprocessor, so that one
# reads while the other begins or ends. In GATE_UP, tile_n outputs need twice as many rows of weights.
GATE_UP = {
    16: Tiles(64, 128, 3, 4),
    32: Tiles(64, 64, 5, 4),
    64: Tiles(64, 64, 4, 4),
    128: Tiles(128, 64, 4, 8),
}
DOWN = {
    16: Tiles(128, 128, 3, 4),
    32: Tiles(128, 64, 5, 4),
    64: Tiles(128, 64, 4, 4),
    128: Tiles(128, 64, 3, 4),
}
FLOAT32 = Tiles(32, 16, 3, 4)  # without tensor cores, for tests: larger tiles exceed the registers
# of 8-bit values. While a program multiplies its products by scales, it leaves the tensor cores to others on the same
# multiprocessor. With a larger TILE_M registers would spill.
SCALED_GATE_UP = {16: Tiles(64, 128, 4, 4), 32: Tiles(64, 128, 3, 4), 64: Tiles(64, 128, 4, 4)}
SCALED_DOWN = {16: Tiles(128, 128, 4, 4), 32: Tiles(128, 128, 3, 4), 64: Tiles(128, 128, 3, 4)}
MAX_SCALED_TILE_M = 64

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [experts, N, K]; or such values, and scales


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
@triton.jit(do_not_specialize=["num_tiles", "num_tokens", "x_scale_stride"])
def _grouped_kernel(
    x_ptr,
    x_tiles,
    x_scale_ptr,
    w_ptr,
    w_tiles,
    scale_ptr,
    weights_ptr,
    pairs_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    num_tokens,
    x_scale_stride,
    N,
    K: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
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
    row = first_row + tl.arange(0, TILE_M)
    is_used = row < end_row
    pair = tl.load(pairs_ptr + row, is_used, 0)
    k = tl.arange(0, TILE_K)
    n = first_n + tl.arange(0, TILE_N)
    first_w = expert * (2 * N if IS_GATED else N) + first_n  # of gate; the rows of up are N rows behind these
    end_w = first_w - first_n + N
    w_scales = scale_ptr, first_w, end_w
    if IS_GATED:
        x_row = pair // TOP_K
        x = x_ptr + x_row.to(tl.int64)[:, None] * K + k[None, :]
        up = tl.zeros([TILE_N, TILE_M], tl.float32)
        up_scales = scale_ptr, first_w + N, end_w + N
    else:
        x_row = row
        weight = tl.load(weights_ptr + pair, is_used, 0.0)  # before the products, which take long
    x_scales = x_scale_ptr, x_row, is_used, x_scale_stride
    # transposed, as in split_k_gemm.py
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        # weights first: they do not wait for `pair`
        w = load_tile(w_tiles, w_ptr, first_w, begin, n < N, K, TILE_N, TILE_K, TMA)
        if IS_GATED:
            up_w = load_tile(w_tiles, w_ptr, first_w + N, begin, n < N, K, TILE_N, TILE_K, TMA)
            x_tile = tl.load(x + begin, is_used[:, None] & (begin + k < K)[None, :], 0.0).T
        else:
            x_tile = load_tile(x_tiles, x_ptr, first_row, begin, is_used, K, TILE_M, TILE_K, TMA).T
        acc = add_product(
            acc, w, x_tile, x_scales, w_scales, begin, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, PRECISION, IS_SCALED
        )
        if IS_GATED:
            up = add_product(
                up, up_w, x_tile, x_scales, up_scales, begin, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, PRECISION, IS_SCALED
            )
    if IS_SCALED:
        acc = times_scales(acc, x_scales, w_scales, 0, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, True)
    if IS_GATED:
        if IS_SCALED:
            up = times_scales(up, x_scales, up_scales, 0, K, X_GROUP, BLOCK_N, BLOCK_K, TILE_N, True)
        y = acc / (1.0 + tl.exp(-acc)) * up
        out_row = row.to(tl.int64)
    else:
        y = acc * weight[None, :]
        out_row = (pair % TOP_K).to(tl.int64) * num_tokens + pair // TOP_K
    out = out_ptr + out_row[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty).T, is_used[:, None] & (n < N)[None, :])


def _grouped_product(
    x: torch.Tensor, weight: Weight, rows: ExpertRows, routing: Routing, out: torch.Tensor, quantize: bool
) -> torch.Tensor:
    """Fill `out`: [rows, size] is what gate and up give, [top_k, T, hidden] what down gives."""
    is_gated, is_scaled, dtype = out.dim() == 2, isinstance(weight, tuple), x.dtype
    values, scales = weight if is_scaled else (weight, None)
    k, n, (block_n, block_k) = values.shape[2], out.shape[-1], block_shape(values, scales)
    if is_scaled:
        tiles = (SCALED_GATE_UP if is_gated else SCALED_DOWN)[rows.tile_m]
    else:
        tiles = FLOAT32 if dtype == torch.float32 else (GATE_UP if is_gated else DOWN)[rows.tile_m]
    if block_k < k:  # a tile lies in one block
        tiles = tiles._replace(tile_k=min(tiles.tile_k, block_k & -block_k))
    use_tma = has_tma(x.device) and k * values.element_size() % 16 == 0 and not (is_scaled and dtype == torch.float32)
    if not use_tma:  # other GPUs may have 99 KB of shared memory
        tiles = tiles._replace(stages=2 if is_scaled else 3)
    inputs = quantize_rows(x, block_k) if quantize else x
    (elements, x_scales, x_scale_stride), values = tensors_of(inputs), as_loadable(values)
    num_tiles, (num_tokens, top_k) = len(rows.table), routing.weights.shape
    launch(_grouped_kernel, (num_tiles * triton.cdiv(n, tiles.tile_n),), x.device)(
        elements,
        _descriptor(elements, rows.tile_m, tiles) if use_tma and not is_gated else None,
        x_scales,
        values,
        _descriptor(values.flatten(0, 1), tiles.tile_n, tiles) if use_tma else None,
        scales,
        routing.weights,
        rows.pairs,
        rows.table,
        out,
        num_tiles,
        num_tokens,
        x_scale_stride,
        n,
        K=k,
        X_GROUP=group_size(inputs, k),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TOP_K=top_k,
        TILE_M=rows.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k,
        STAGES=tiles.stages,
        GROUP_M=GROUP_M,
        IS_GATED=is_gated,
        IS_SCALED=is_scaled,
        TMA=use_tma,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )
    return out


def moe_gemm(
    x: torch.Tensor, routing: Routing, gate_up: Weight, down: Weight, first_expert: int = 0, quantize: bool = False
) -> torch.Tensor:
    """x [T, hidden] -> [top_k, T, hidden], whose sum over the choices is the output; T is not 0.

    The weights are those of this rank's experts, from `first_expert` on: gate_up [experts, 2 * size, hidden] and
    down [experts, hidden, size]. Parts of tokens whose experts are on other ranks are not written. All contiguous, rows
    of a multiple of 16 bytes. Of 8-bit values, the scales are [experts, N / block rows, K / block columns], with at
    least 32 columns; with `quantize`, the products are those of e4m3.
    """
    is_scaled = isinstance(down, tuple)
    num_local, hidden, size = (down[0] if is_scaled else down).shape
    tile_m = choose_tile_m(routing.expert_ids.numel(), routing.num_experts)
    tile_m = min(MAX_SCALED_TILE_M, tile_m) if is_scaled else tile_m
    rows = sort_by_expert(routing.expert_ids, first_expert, num_local, tile_m)
    h = _grouped_product(x, gate_up, rows, routing, x.new_empty(len(rows.pairs), size), quantize)
    out = x.new_empty(routing.weights.shape[1], len(x), hidden)
    return _grouped_product(h, down, rows, routing, out, quantize)


def _descriptor(matrix: torch.Tensor, num_rows: int, tiles: Tiles) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [num_rows, tiles.tile_k])


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _sum_parts_kernel(
    parts_ptr,
    ids_ptr,
    out_ptr,
    num_tokens,
    first_expert,
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice) - first_expert
        limit = tl.where((expert >= 0) & (expert < E), N, 0)
        total += tl.load(parts_ptr + (choice * num_tokens + token) * N + col, col < limit, 0.0).to(tl.float32)
    tl.store(out_ptr + token * N + col, total.to(out_ptr.dtype.element_ty), col < N)


def sum_local_parts(
    parts: torch.Tensor, routing: Routing, first_expert: int, num_experts: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of the parts [top_k, T, hidden] of this rank's experts: [T, hidden]; `out` takes it.

    A single rank leaves this to the next norm. Several would read the parts of all other ranks there.
    """
    top_k, num_tokens, n = parts.shape
    out = torch.empty_like(parts[0]) if out is None else out
    block = min(2048, triton.next_power_of_2(n))
    launch(_sum_parts_kernel, (num_tokens, triton.cdiv(n, block)), parts.device)(
        parts,
        routing.expert_ids,
        out,
        num_tokens,
        first_expert,
        N=n,
        E=num_experts,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out

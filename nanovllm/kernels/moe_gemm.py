"""Mixture of experts for many tokens: grouped products over rows that are sorted by expert (moe_routing.py).

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

GROUP_M = 4  # tiles of rows that take the same tile of weights one after the other, which is then in the L2 cache


class Tiles(NamedTuple):
    """How a product is divided."""

    tile_n: int
    tile_k: int
    stages: int
    warps: int


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


@triton.jit
def load_tile(
    tiles, ptr, first_row, begin, is_row, K: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr
):
    """A tile [ROWS, TILE_K] of a matrix with K columns, from its descriptor, or its pointer on GPUs without TMA.

    A descriptor also reads rows that are not `is_row`, and zeros beyond the matrix.
    """
    if TMA:
        tile = tiles.load([first_row, begin])
    else:
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        k = begin + tl.arange(0, TILE_K)
        tile = tl.load(ptr + row[:, None] * K + k[None, :], is_row[:, None] & (k < K)[None, :], 0.0)
    return tile


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gate_up_kernel(
    x_ptr,
    w_ptr,
    w_tiles,
    pairs_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    N,
    K: tl.constexpr,
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
    row = first_row + tl.arange(0, TILE_M)
    is_used = row < end_row
    token = tl.load(pairs_ptr + row, is_used, 0) // TOP_K
    k = tl.arange(0, TILE_K)
    x = x_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
    gate_row = expert * 2 * N + first_n
    n = first_n + tl.arange(0, TILE_N)
    # transposed, as in split_k_gemm.py
    gate = tl.zeros([TILE_N, TILE_M], tl.float32)
    up = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        # weights first: they do not wait for `token`
        gate_w = load_tile(w_tiles, w_ptr, gate_row, begin, n < N, K, TILE_N, TILE_K, TMA)
        up_w = load_tile(w_tiles, w_ptr, gate_row + N, begin, n < N, K, TILE_N, TILE_K, TMA)
        x_tile = tl.load(x + begin, is_used[:, None] & (begin + k < K)[None, :], 0.0).T
        gate = tl.dot(gate_w, x_tile, gate, input_precision=PRECISION)
        up = tl.dot(up_w, x_tile, up, input_precision=PRECISION)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + n[None, :], y.T, is_used[:, None] & (n < N)[None, :])


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tiles", "num_tokens"])
def _grouped_down_kernel(
    h_ptr,
    h_tiles,
    w_ptr,
    w_tiles,
    weights_ptr,
    pairs_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    num_tokens,
    N,
    K: tl.constexpr,
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
    row = first_row + tl.arange(0, TILE_M)
    is_used = row < end_row
    # loaded before the products and needed after them
    pair = tl.load(pairs_ptr + row, is_used, 0)
    weight = tl.load(weights_ptr + pair, is_used, 0.0)
    n = first_n + tl.arange(0, TILE_N)
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in tl.range(0, K, TILE_K, num_stages=STAGES):
        h = load_tile(h_tiles, h_ptr, first_row, begin, is_used, K, TILE_M, TILE_K, TMA).T
        w = load_tile(w_tiles, w_ptr, expert * N + first_n, begin, n < N, K, TILE_N, TILE_K, TMA)
        acc = tl.dot(w, h, acc, input_precision=PRECISION)
    y = (acc * weight[None, :]).to(out_ptr.dtype.element_ty)
    out_row = (pair % TOP_K).to(tl.int64) * num_tokens + pair // TOP_K
    tl.store(out_ptr + out_row[:, None] * N + n[None, :], y.T, is_used[:, None] & (n < N)[None, :])


def tile_descriptor(matrix: torch.Tensor, num_rows: int, options: dict[str, Any]) -> TensorDescriptor | None:
    """A TMA descriptor of tiles of `num_rows` rows; None on GPUs without TMA."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, options["TILE_K"]]) if options["TMA"] else None


def _product_options(tiles: Tiles, rows: ExpertRows, x: torch.Tensor, k: int) -> dict[str, Any]:
    """The launch options that both products share, for x [_, k] and weights of its dtype."""
    tiles = FLOAT32 if x.dtype == torch.float32 else tiles
    use_tma = has_tma(x.device) and k * x.element_size() % 16 == 0
    return dict(
        TILE_M=rows.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k,
        STAGES=tiles.stages if use_tma else min(3, tiles.stages),  # other GPUs may have 99 KB of shared memory
        GROUP_M=GROUP_M,
        TMA=use_tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )


def grouped_gate_up(
    x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, top_k: int, tiles: Tiles | None = None
) -> torch.Tensor:
    """silu(x W_gate^T) * (x W_up^T) of each row: x [T, hidden], weight [experts, 2 * size, hidden] -> [rows, size]."""
    num_tiles, size, hidden = len(rows.table), weight.shape[1] // 2, weight.shape[2]
    options = _product_options(tiles or GATE_UP[rows.tile_m], rows, x, hidden)
    out = torch.empty((len(rows.pairs), size), dtype=x.dtype, device=x.device)
    launch(_grouped_gate_up_kernel, (num_tiles * triton.cdiv(size, options["TILE_N"]),), x.device)(
        x,
        weight,
        tile_descriptor(weight.flatten(0, 1), options["TILE_N"], options),
        rows.pairs,
        rows.table,
        out,
        num_tiles,
        size,
        K=hidden,
        TOP_K=top_k,
        **options,
    )
    return out


def grouped_down(
    h: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, routing: Routing, tiles: Tiles | None = None
) -> torch.Tensor:
    """h W^T of each row times its routing weight: h [rows, size], weight [experts, hidden, size] -> [top_k, T, hidden].

    Parts of tokens whose experts are on other ranks are not written.
    """
    (num_tokens, top_k), (_, hidden, size), num_tiles = routing.weights.shape, weight.shape, len(rows.table)
    options = _product_options(tiles or DOWN[rows.tile_m], rows, h, size)
    out = torch.empty((top_k, num_tokens, hidden), dtype=h.dtype, device=h.device)
    launch(_grouped_down_kernel, (num_tiles * triton.cdiv(hidden, options["TILE_N"]),), h.device)(
        h,
        tile_descriptor(h, rows.tile_m, options),
        weight,
        tile_descriptor(weight.flatten(0, 1), options["TILE_N"], options),
        routing.weights,
        rows.pairs,
        rows.table,
        out,
        num_tiles,
        num_tokens,
        hidden,
        K=size,
        TOP_K=top_k,
        **options,
    )
    return out


def moe_gemm(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    """x [T, hidden] -> [top_k, T, hidden], whose sum over the choices is the output; T is not 0.

    The weights are those of this rank's experts, from `first_expert` on. Parts of tokens whose experts are on other
    ranks are not written. All contiguous, rows of a multiple of 16 bytes.
    """
    tile_m = choose_tile_m(routing.expert_ids.numel(), routing.num_experts)
    rows = sort_by_expert(routing.expert_ids, first_expert, len(gate_up), tile_m)
    h = grouped_gate_up(x, gate_up, rows, routing.expert_ids.shape[1])
    return grouped_down(h, down, rows, routing)


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

"""Mixture of experts for many tokens: grouped GEMMs over rows sorted by expert (moe_routing.py).

If weights have 8 bits, GPUs with FP8 units quantize the inputs of both GEMMs to e4m3. Other GPUs convert 8-bit weights
to the dtype of x.

A token has `top_k` results. The results are stored separately, and the next norm adds them. Adding the results in the
GEMM would need atomic additions, whose order changes from run to run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, has_tma
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.quantize_rows import quantize_rows
from nanovllm.kernels.linear.tiles import Tiles, Weight, add_product, block_shape, load_tile, operands_of, times_scales
from nanovllm.moe.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing, sort_by_expert

# consecutive tiles of rows that use the same tile of weights, which then stays in the L2 cache
GROUP_M = tl.constexpr(4)

# By TILE_M, for elements of two bytes. If reading weights limits the speed, two programs fit on a multiprocessor, so
# that one program reads while the other begins or ends. In GATE_UP, tile_n outputs need 2 * tile_n rows of weights.
GATE_UP = {16: Tiles(64, 128, 3, 4), 32: Tiles(64, 64, 5, 4), 64: Tiles(64, 64, 4, 4), 128: Tiles(128, 64, 4, 8)}
DOWN = {16: Tiles(128, 128, 3, 4), 32: Tiles(128, 64, 5, 4), 64: Tiles(128, 64, 4, 4), 128: Tiles(128, 64, 3, 4)}
FLOAT32 = Tiles(32, 16, 3, 4)  # without tensor cores, for tests; larger tiles exceed the registers
# For 8-bit values. While a program multiplies its results by scales, other programs on the same multiprocessor use the
# tensor cores. With a larger TILE_M, registers would spill.
SCALED_GATE_UP = {16: Tiles(64, 128, 4, 4), 32: Tiles(64, 128, 3, 4), 64: Tiles(64, 128, 4, 4)}
SCALED_DOWN = {16: Tiles(128, 128, 4, 4), 32: Tiles(128, 128, 3, 4), 64: Tiles(128, 128, 3, 4)}
MAX_SCALED_TILE_M = 64


def choose_tile_m(num_pairs: int, num_experts: int, is_scaled: bool = False) -> int:
    """Return the smallest TILE_M that is at least 1.5 times the mean number of rows per expert. The maximum is 128.

    If tiles were smaller, an expert's weights would be read more often. If the weights have scales, TILE_M is at most
    MAX_SCALED_TILE_M.
    """
    tile_m = next((size for size in (16, 32, 64) if 2 * size * num_experts >= 3 * num_pairs), 128)
    return min(tile_m, MAX_SCALED_TILE_M) if is_scaled else tile_m


@triton.jit
def add_bias(y, bias_ptr, row, is_row):
    """Add the bias, if there is one, to y [tile_n, tile_m]. `row` [tile_n] contains the indices of the outputs in y."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, is_row, 0.0).to(tl.float32)[:, None]
    return y


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_kernel(
    x_tiles,
    w_tiles,
    scale_ptrs,
    bias_ptr,
    routing_ptrs,
    out_ptr,
    num_tokens,
    N,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes `tile_n` outputs of at most TILE_M rows of one expert.

    If IS_GATED is set, the kernel computes the first GEMM and the activation. In the first GEMM, x is in the order of
    tokens, so the kernel gathers rows one by one, and `x_tiles` is a plain pointer.
    """
    gdc_launch_and_wait(PDL)
    weights_ptr, pairs_ptr, table_ptr = routing_ptrs
    tiles_of_n = tl.cdiv(N, TILES.tile_n)
    first_tile = tl.program_id(0) // (GROUP_M * tiles_of_n) * GROUP_M
    group_size = tl.minimum(tl.num_programs(0) // tiles_of_n - first_tile, GROUP_M)
    index = tl.program_id(0) - first_tile * tiles_of_n
    first_n = index // group_size * TILES.tile_n
    field = table_ptr + (first_tile + index % group_size) * TILE_FIELDS
    expert, first_row, end_row = tl.load(field), tl.load(field + 1), tl.load(field + 2)
    if expert < 0:
        return
    row = first_row + tl.arange(0, TILES.tile_m)
    is_used = row < end_row
    pair = tl.load(pairs_ptr + row, is_used, 0)
    k = tl.arange(0, TILES.tile_k)
    n = first_n + tl.arange(0, TILES.tile_n)
    first_w = expert * (2 * N if IS_GATED else N) + first_n  # row of gate_proj; up_proj begins N rows later
    end_w = first_w - first_n + N
    w_scales = scale_ptrs.w, first_w, end_w
    if IS_GATED:
        x_row = pair // TOP_K
        x = x_tiles + x_row.to(tl.int64)[:, None] * SHAPE.k + k[None, :]
        up = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
        up_scales = scale_ptrs.w, first_w + N, end_w + N
    else:
        x_row = row
        weight = tl.load(weights_ptr + pair, is_used, 0.0)  # before the long loop
    x_scales = scale_ptrs.x, x_row, is_used, scale_ptrs.x_stride
    # transposed, as in split_k_gemm.py
    acc = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
    for begin in tl.range(0, SHAPE.k, TILES.tile_k, num_stages=TILES.stages):
        # weights first: they do not wait for `pair`
        w = load_tile(w_tiles, first_w, begin, n < N, SHAPE.k, TILES)
        if IS_GATED:
            up_w = load_tile(w_tiles, first_w + N, begin, n < N, SHAPE.k, TILES)
            x_tile = tl.load(x + begin, is_used[:, None] & (begin + k < SHAPE.k)[None, :], 0.0).T
        else:
            x_tile = load_tile(x_tiles, first_row, begin, is_used, SHAPE.k, TILES).T
        acc = add_product(acc, w, x_tile, x_scales, w_scales, begin, SHAPE, TILES)
        if IS_GATED:
            up = add_product(up, up_w, x_tile, x_scales, up_scales, begin, SHAPE, TILES)
    acc = times_scales(acc, x_scales, w_scales, 0, SHAPE, TILES, True)
    acc = add_bias(acc, bias_ptr, end_w - N + n, n < N)
    if IS_GATED:
        up = times_scales(up, x_scales, up_scales, 0, SHAPE, TILES, True)
        y = activate(acc, add_bias(up, bias_ptr, end_w + n, n < N), ACT)
        out_row = row.to(tl.int64)
    else:
        y = acc * weight[None, :]
        out_row = (pair % TOP_K).to(tl.int64) * num_tokens + pair // TOP_K
    out = out_ptr + out_row[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty).T, is_used[:, None] & (n < N)[None, :])


def grouped_product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    rows: ExpertRows,
    routing: Routing,
    out: torch.Tensor,
    quantize: bool,
    activation: tuple | None = None,
) -> torch.Tensor:
    """Compute the first GEMM into `out` [rows, size], or the second GEMM into `out` [top_k, T, hidden].

    The second GEMM needs the rows of x in the order of `rows`.
    """
    is_gated, is_scaled, is_float32 = out.dim() == 2, isinstance(weight, tuple), x.dtype == torch.float32
    is_for_hopper = rows.tile_m == 128 and not is_gated and not is_float32 and bias is None
    if is_for_hopper and out.shape[2] % 256 == 0 and has_hopper_kernels():
        from nanovllm.moe.kernels import hopper_experts  # it needs Gluon of Triton 3.6

        return hopper_experts.experts_down(x, weight, rows, routing, out)
    inputs = quantize_rows(x, block_shape(*weight)[1]) if quantize else x
    elements, values, scales, shape = operands_of(inputs, weight)
    if is_scaled:
        tiles = (SCALED_GATE_UP if is_gated else SCALED_DOWN)[rows.tile_m]
    else:
        tiles = FLOAT32 if is_float32 else (GATE_UP if is_gated else DOWN)[rows.tile_m]
    if shape.block_k < shape.k:  # a tile must lie in one block
        tiles = tiles._replace(tile_k=min(tiles.tile_k, shape.block_k & -shape.block_k))
    if has_tma(x.device) and shape.k * values.element_size() % 16 == 0 and not (is_scaled and is_float32):
        weight_tiles = TensorDescriptor.from_tensor(values.flatten(0, 1), [tiles.tile_n, tiles.tile_k])
        if not is_gated:
            elements = TensorDescriptor.from_tensor(elements, [rows.tile_m, tiles.tile_k])
    else:  # other GPUs may have 99 KB of shared memory
        weight_tiles, tiles = values, tiles._replace(stages=2 if is_scaled else 3, tma=False)
    (num_tokens, top_k), n = routing.weights.shape, out.shape[-1]
    operands = elements, weight_tiles, scales, bias, (routing.weights, rows.pairs, rows.table), out
    constants = dict(
        SHAPE=shape, TILES=tiles._replace(tile_m=rows.tile_m), TOP_K=top_k, IS_GATED=is_gated, ACT=activation
    )
    launch(_grouped_kernel, (len(rows.table) * triton.cdiv(n, tiles.tile_n),), x.device)(
        *operands, num_tokens, n, **constants, num_warps=tiles.warps
    )
    return out


def moe_gemm(
    x: torch.Tensor,
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    first_expert: int = 0,
    quantize: bool = False,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    activation: tuple | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute this rank's experts for x [T, hidden]. The rank's first expert is `first_expert`. T must be positive.

    Return `out` [top_k, T, hidden], which the caller sums over the first dimension. Results of other ranks' experts are
    not written. `gate_up` is [experts, 2 * size, hidden], and `down` is [experts, hidden, size]. All tensors are
    contiguous, and the size of a row is a multiple of 16 bytes. If an 8-bit weight is [experts, N, K], its scales are
    [experts, N / block rows, K / block columns]. A scale block has at least 32 columns. If `quantize` is True,
    activations are quantized to e4m3. `biases` are [experts, 2 * size] and [experts, hidden].
    """
    is_scaled = isinstance(down, tuple)
    num_local, hidden, size = (down[0] if is_scaled else down).shape
    tile_m = choose_tile_m(routing.expert_ids.numel(), routing.num_experts, is_scaled)
    rows = sort_by_expert(routing.expert_ids, first_expert, num_local, tile_m)
    h = x.new_empty(len(rows.pairs), size)
    grouped_product(x, gate_up, biases[0], rows, routing, h, quantize, activation)
    if out is None:
        out = x.new_empty(routing.weights.shape[1], len(x), hidden)
    return grouped_product(h, down, biases[1], rows, routing, out, quantize)


class SumSizes(NamedTuple):
    num_local: int  # experts of this rank
    top_k: int
    n: int


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _sum_parts_kernel(
    parts_ptr, ids_ptr, out_ptr, num_tokens, first_expert, SIZES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # A program computes BLOCK outputs of a token.
    gdc_launch_and_wait(PDL)
    TOP_K: tl.constexpr = SIZES.top_k
    N: tl.constexpr = SIZES.n
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice) - first_expert
        limit = tl.where((expert >= 0) & (expert < SIZES.num_local), N, 0)
        total += tl.load(parts_ptr + (choice * num_tokens + token) * N + col, col < limit, 0.0).to(tl.float32)
    tl.store(out_ptr + token * N + col, total.to(out_ptr.dtype.element_ty), col < N)


def sum_local_parts(
    parts: torch.Tensor, routing: Routing, first_expert: int, num_experts: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add up the results [top_k, T, hidden] of this rank's experts. Return the sum [T, hidden] in `out`.

    On a single rank, the next norm can add the results instead. On several ranks, the norm would have to read `top_k`
    times as much from each rank.
    """
    top_k, num_tokens, n = parts.shape
    out = torch.empty_like(parts[0]) if out is None else out
    sizes, block = SumSizes(num_experts, top_k, n), min(2048, triton.next_power_of_2(n))
    launch(_sum_parts_kernel, (num_tokens, triton.cdiv(n, block)), parts.device)(
        parts, routing.expert_ids, out, num_tokens, first_expert, SIZES=sizes, BLOCK=block
    )
    return out

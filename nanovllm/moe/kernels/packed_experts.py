"""Mixture of experts with 4-bit weights: the grouped GEMMs of moe_gemm.py. Any number of tokens is supported.

On Hopper, the GEMMs are Gluon kernels, which need rows sorted by expert. Separate kernels sort the rows of x and
compute the activation. On other GPUs, moe_gemm.py multiplies many rows, after a kernel has converted the weights to the
dtype of x.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import SWIGLU
from nanovllm.kernels.hopper.hopper_tiles import SMALL_TILE_M, suits_packed_kernels
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch, next_power_of_2
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.tiles import Tiles
from nanovllm.moe.kernels.moe_gemm import add_bias, choose_tile_m, moe_gemm
from nanovllm.moe.kernels.moe_routing import TILE_FIELDS, ExpertRows, Routing, sort_by_expert
from nanovllm.quantization.kernels.packed_gemm import (
    FEW_ROWS,
    add_packed_product,
    dequantize_packed,
    packed_operands,
    packed_tiles,
    times_row_scales,
)

MIN_CONVERTED_ROWS = 256  # from this mean number of rows per expert on, converting the weights first is faster
MAX_CONVERTED_BYTES = 2**30


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tokens"])
def _packed_grouped_kernel(
    x_ptr,
    w_ptrs,
    bias_ptr,
    routing_ptrs,
    out_ptr,
    num_tokens,
    N,
    SHAPE: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes `tile_n` outputs of at most `tile_m` rows of one expert.

    If IS_GATED is set, the kernel computes the first GEMM and the activation, and x is in the order of tokens.
    """
    gdc_launch_and_wait(PDL)
    weights_ptr, pairs_ptr, table_ptr = routing_ptrs
    field = table_ptr + tl.program_id(1) * TILE_FIELDS
    expert, first_row, end_row = tl.load(field), tl.load(field + 1), tl.load(field + 2)
    if expert < 0:
        return
    if w_ptrs[4] is not None:
        w_ptrs = (w_ptrs[0], w_ptrs[1], w_ptrs[2], w_ptrs[3], w_ptrs[4] + expert * SHAPE.k)
    row = first_row + tl.arange(0, SHAPE.tile_m)
    is_used = row < end_row
    pair = tl.load(pairs_ptr + row, is_used, 0)
    n = tl.program_id(0) * SHAPE.tile_n + tl.arange(0, SHAPE.tile_n)
    w_row = expert * (2 * N if IS_GATED else N) + n
    x_row = pair // TOP_K if IS_GATED else row
    zeros = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
    y = add_packed_product(zeros, x_ptr, x_row, is_used, w_ptrs, w_row, n < N, 0, SHAPE.words, SHAPE)
    y = add_bias(times_row_scales(y, w_ptrs, w_row, n < N), bias_ptr, w_row, n < N)
    if IS_GATED:
        up = add_packed_product(zeros, x_ptr, x_row, is_used, w_ptrs, w_row + N, n < N, 0, SHAPE.words, SHAPE)
        up = times_row_scales(up, w_ptrs, w_row + N, n < N)
        y = activate(y, add_bias(up, bias_ptr, w_row + N, n < N), ACT)
        out_row = row.to(tl.int64)
    else:
        y *= tl.load(weights_ptr + pair, is_used, 0.0)[None, :]
        out_row = (pair % TOP_K).to(tl.int64) * num_tokens + pair // TOP_K
    out = out_ptr + out_row[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty).T, is_used[:, None] & (n < N)[None, :])


def grouped_packed_product(
    x: torch.Tensor,
    weight,
    bias,
    rows: ExpertRows,
    routing: Routing,
    tiles: Tiles,
    out: torch.Tensor,
    activation=None,
) -> torch.Tensor:
    """Compute the first GEMM into `out` [rows, size], or the second GEMM into `out` [top_k, T, hidden]."""
    (num_tokens, top_k), n, is_gated = routing.weights.shape, out.shape[-1], out.dim() == 2
    pointers, shape = packed_operands(weight, x.dtype, tiles)
    operands = x, pointers, bias, (routing.weights, rows.pairs, rows.table), out, num_tokens, n
    launch(_packed_grouped_kernel, (triton.cdiv(n, tiles.tile_n), len(rows.table)), x.device)(
        *operands, SHAPE=shape, TOP_K=top_k, IS_GATED=is_gated, ACT=activation, num_warps=tiles.warps
    )
    return out


@dependent_kernel()
@triton.jit(do_not_specialize=["num_pairs"])
def _gather_pairs_kernel(x_ptr, pairs_ptr, out_ptr, num_pairs, N: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr):
    # A program copies a row of x. The last pairs may be unwritten, if other ranks have experts.
    gdc_launch_and_wait(PDL)
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, next_power_of_2(N))
    pair = tl.minimum(tl.maximum(tl.load(pairs_ptr + row), 0), num_pairs - 1)
    x = tl.load(x_ptr + (pair // TOP_K).to(tl.int64) * N + n, n < N, 0.0)
    tl.store(out_ptr + row * N + n, x, n < N)


@dependent_kernel()
@triton.jit
def _activate_kernel(x_ptr, out_ptr, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # A program computes BLOCK outputs of a row from x [rows, 2N].
    gdc_launch_and_wait(PDL)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * (2 * N) + n
    y = activate(tl.load(at, n < N, 0.0).to(tl.float32), tl.load(at + N, n < N, 0.0).to(tl.float32), ACT)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), n < N)


def _sorted_rows(x: torch.Tensor, rows: ExpertRows | None, top_k: int) -> torch.Tensor:
    """Return a tensor [T * top_k, hidden]: the rows of x [T, hidden] in the order of `rows`. If T is 1, return x."""
    if len(x) == 1:
        return x
    num_pairs, hidden = len(rows.pairs), x.shape[1]
    out = x.new_empty(num_pairs, hidden)
    launch(_gather_pairs_kernel, (num_pairs,), x.device)(x, rows.pairs, out, num_pairs, N=hidden, TOP_K=top_k)
    return out


def _activated(gate_and_up: torch.Tensor, activation) -> torch.Tensor:
    """Apply the gated activation, which maps [rows, 2 * size] to [rows, size]."""
    num_rows, size, block = len(gate_and_up), gate_and_up.shape[1] // 2, 1024
    out = gate_and_up.new_empty(num_rows, size)
    launch(_activate_kernel, (num_rows, triton.cdiv(size, block)), out.device)(
        gate_and_up, out, N=size, ACT=activation, BLOCK=block
    )
    return out


def _by_hopper_kernels(
    x: torch.Tensor, routing: Routing, gate_up, down, first_expert: int, biases: tuple, activation
) -> torch.Tensor:
    from nanovllm.moe.kernels.hopper_packed_experts import packed_rows  # needs Gluon of Triton 3.6

    (num_local, hidden, _), (num_tokens, top_k) = down.words.shape, routing.expert_ids.shape
    is_small, num_pairs = num_tokens <= SMALL_TILE_M, num_tokens * top_k
    tile_m = SMALL_TILE_M if is_small else choose_tile_m(num_pairs, routing.num_experts)
    rows = None if num_tokens == 1 else sort_by_expert(routing.expert_ids, first_expert, num_local, tile_m)

    def multiply(rows_of_x: torch.Tensor, weight, bias: torch.Tensor | None, sizes, act=None) -> torch.Tensor:
        return packed_rows(rows_of_x, weight, bias, rows, routing, first_expert, x.new_empty(sizes), act)

    # no names for the large results, so that each one's memory is free when the next kernel has read it
    if is_small and gate_up.zeros is None:
        h = multiply(_sorted_rows(x, rows, top_k), gate_up, biases[0], (num_pairs, down.k), activation or SWIGLU)
    else:
        h = _activated(multiply(_sorted_rows(x, rows, top_k), gate_up, biases[0], (num_pairs, 2 * down.k)), activation)
    return multiply(h, down, biases[1], (top_k, num_tokens, hidden))


def _with_converted_weights(
    x: torch.Tensor, routing: Routing, gate_up, down, first_expert: int, biases: tuple, activation
) -> torch.Tensor:
    """Compute `moe_gemm` with converted weights.

    The weights of a few experts at a time are converted, so that they fit into a buffer.
    """
    num_local, hidden, _ = down.words.shape
    out = x.new_empty(routing.weights.shape[1], len(x), hidden)
    step = max(1, MAX_CONVERTED_BYTES // (3 * hidden * down.k * x.itemsize))
    for begin in range(0, num_local, step):
        some = slice(begin, begin + step)
        weights = (dequantize_packed(weight.of(some), x.dtype) for weight in (gate_up, down))
        terms = tuple(None if bias is None else bias[some] for bias in biases)
        moe_gemm(x, routing, *weights, first_expert + begin, biases=terms, activation=activation, out=out)
    return out


def packed_experts(
    x: torch.Tensor, routing: Routing, gate_up, down, first_expert: int = 0, biases=(None, None), activation=None
) -> torch.Tensor:
    """Compute `moe_gemm` with stacks of Packed weights."""
    arguments = x, routing, gate_up, down, first_expert, biases, activation
    if suits_packed_kernels(x, gate_up) and suits_packed_kernels(x, down):
        return _by_hopper_kernels(*arguments)
    is_contiguous = gate_up.group_ids is None and down.group_ids is None
    if is_contiguous and routing.expert_ids.numel() >= MIN_CONVERTED_ROWS * routing.num_experts:
        return _with_converted_weights(*arguments)
    return grouped_packed_experts(*arguments)


def grouped_packed_experts(
    x: torch.Tensor, routing: Routing, gate_up, down, first_expert: int = 0, biases=(None, None), activation=None
) -> torch.Tensor:
    """Compute `packed_experts` on any GPU. A row's results do not depend on the other rows."""
    (num_local, hidden, _), num_pairs = down.words.shape, routing.expert_ids.numel()
    tiles = packed_tiles(len(x) if len(x) <= FEW_ROWS else choose_tile_m(num_pairs, routing.num_experts))
    rows = sort_by_expert(routing.expert_ids, first_expert, num_local, tiles.tile_m)
    h = x.new_empty(len(rows.pairs), down.k)
    grouped_packed_product(x, gate_up, biases[0], rows, routing, tiles, h, activation)
    out = x.new_empty(routing.weights.shape[1], len(x), hidden)
    return grouped_packed_product(h, down, biases[1], rows, routing, tiles, out)

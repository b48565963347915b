"""Computes a norm, y = x W^T + b and an activation in one kernel, for a single row x."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.tiles import NO_NORM, Tiles


class Inputs(NamedTuple):
    """The tensors from which the kernel computes its input row."""

    x: torch.Tensor
    residual: torch.Tensor | None
    total: torch.Tensor  # receives x + residual


@triton.jit
def _load_if(ptr, at, inside, OTHERWISE: tl.constexpr):
    """Load elements of a norm's weight or of a bias, or OTHERWISE if the tensor is missing."""
    return tl.load(ptr + at, inside, 0.0).to(tl.float32) if ptr is not None else OTHERWISE


@triton.jit
def _load_input(x_ptrs, norm_weight, k, inside):
    """Return a tile of the input row times the norm's weight, and the squares of the row's elements."""
    x = tl.load(x_ptrs.x + k, inside, 0.0).to(tl.float32)
    if x_ptrs.residual is not None:
        total = x + tl.load(x_ptrs.residual + k, inside, 0.0).to(tl.float32)
        total = total.to(x_ptrs.total.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(x_ptrs.total + k, total, inside)
        x = total.to(tl.float32)
    return (x * norm_weight)[None, :], x * x


@dependent_kernel(early=("w_ptrs",))
@triton.jit
def _gemv_kernel(
    x_ptrs, w_ptrs, out_ptr, N, eps, K: tl.constexpr, TILES: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr
):
    # A program computes tile_n outputs. It reads the row in tiles of tile_k inputs.
    gdc_launch_dependents(PDL)
    w_ptr, bias_ptr, norm_ptr = w_ptrs
    n = tl.program_id(0) * TILES.tile_n + tl.arange(0, TILES.tile_n)
    k = tl.arange(0, TILES.tile_k)
    rows = (n < N)[:, None]
    w = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    up = w + N * K
    # while the previous kernel runs, load what no kernel writes: the first tiles of W, biases, the norm's weight
    w_tile = tl.load(w, rows & (k < K)[None, :], 0.0, eviction_policy="evict_first").to(tl.float32)
    if GATED:
        up_tile = tl.load(up, rows & (k < K)[None, :], 0.0, eviction_policy="evict_first").to(tl.float32)
        up_bias = _load_if(bias_ptr, N + n, n < N, 0.0)
    bias = _load_if(bias_ptr, n, n < N, 0.0)
    norm_weight = _load_if(norm_ptr, k, k < K, 1.0)
    gdc_wait(PDL)
    x, squares = _load_input(x_ptrs, norm_weight, k, k < K)
    acc = w_tile * x
    if GATED:
        up_acc = up_tile * x
    for begin in tl.range(TILES.tile_k, K, TILES.tile_k, num_stages=TILES.stages):
        at = begin + k
        inside = rows & (at < K)[None, :]
        x, more = _load_input(x_ptrs, _load_if(norm_ptr, at, at < K, 1.0), at, at < K)
        squares += more
        acc += tl.load(w + begin, inside, 0.0, eviction_policy="evict_first").to(tl.float32) * x
        if GATED:
            up_acc += tl.load(up + begin, inside, 0.0, eviction_policy="evict_first").to(tl.float32) * x
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if norm_ptr is not None else 1.0
    y = tl.sum(acc, 1) * scale + bias
    if GATED:
        up_y = tl.sum(up_acc, 1) * scale + up_bias
        y = y / (1.0 + tl.exp(-y)) * up_y
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), n < N)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, norm=NO_NORM, residual=None, gated: bool = False, bias=None, out=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = x W^T + bias in `out`, and x + residual, for a single row x.

    x is [1, K], W is [N, K], `bias` is [N], and y is [1, N]. All tensors are contiguous. `norm` is a pair: the weight
    [K] and the eps of an RMS norm. With `norm`, the norm of x + residual replaces x in the matmul. A residual requires
    a norm. Without a residual, the second result is x. If `gated`, the weight is [2N, K], the bias is [2N], and y is
    silu(first half of the outputs) * second half.
    """
    norm_weight, eps = norm
    assert norm_weight is not None or residual is None
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    inputs = Inputs(x, residual, x if residual is None else torch.empty_like(x))
    # Short matmuls gain from overlapping kernels. For long matmuls, 75% of the memory holds four programs of 40 KB
    # each. The driver would choose a different percentage for each kernel.
    shared = 50 if weight.numel() <= 2**23 else 75
    tile_size = (8192 if gated else 16384) // x.element_size()  # in weights; with `gated`, two tiles are loaded
    # for the shortest matmuls, programs load as much as they can before they wait
    tile_k = min(tile_size // (2 if weight.numel() <= 2**22 else 4), 1 << (k - 1).bit_length())
    tiles = Tiles(tile_size // tile_k, tile_k, stages=3, warps=4)
    # with so few registers, more programs run at once; with larger tiles, registers would spill
    constants = dict(K=k, TILES=tiles, GATED=gated, maxnreg=64 if k <= tile_k and not gated else None)
    launch(_gemv_kernel, (-(-n // tiles.tile_n),), x.device, shared)(
        inputs, (weight, bias, norm_weight), out, n, eps, **constants, num_warps=tiles.warps
    )
    return out, inputs.total

"""y = x W^T + b for a single row of x, with the norm before it and the activation after it; bound by reading W."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.tiles import NO_NORM, Tiles


class Inputs(NamedTuple):
    """What makes the row that is multiplied; None where there is none."""

    x: torch.Tensor
    residual: torch.Tensor | None
    total: torch.Tensor  # takes x + residual


@triton.jit
def _load_if(ptr, at, inside, OTHERWISE: tl.constexpr):
    """Elements of the norm's weight or of the bias; if there is none, what changes nothing."""
    return tl.load(ptr + at, inside, 0.0).to(tl.float32) if ptr is not None else OTHERWISE


@triton.jit
def _load_input(x_ptrs, norm_weight, k, inside):
    """A tile of the row that is multiplied, not yet divided by its root mean square, and the squares for that."""
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
    gdc_launch_dependents(PDL)
    w_ptr, bias_ptr, norm_ptr = w_ptrs
    n = tl.program_id(0) * TILES.tile_n + tl.arange(0, TILES.tile_n)
    k = tl.arange(0, TILES.tile_k)
    rows = (n < N)[:, None]
    w = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    up = w + N * K
    # load the first tiles of W, and what else no kernel writes, while the kernel before still runs
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
    """x [1, K] times weight [N, K] transposed + bias [N] -> y [1, N], and x + residual [1, K], or x itself without a
    residual.

    With a `norm`, its weight [K] and its eps, the RMS norm of x + residual is multiplied instead of x; a residual
    requires one. If `gated`, weight is [2N, K], bias [2N], and y is silu of the first half of the outputs times the
    second half. All contiguous. `out` takes y.
    """
    norm_weight, eps = norm
    assert norm_weight is not None or residual is None
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    inputs = Inputs(x, residual, x if residual is None else torch.empty_like(x))
    # short products gain from overlapping kernels; 75 has room for four programs of long ones, which keep 40 KB each,
    # and the driver's own division would differ from one to the next
    shared = 50 if weight.numel() <= 2**23 else 75
    tile_size = (8192 if gated else 16384) // x.element_size()  # in weights; a gated product loads two tiles
    # programs of the shortest ones load as much as they can before they wait
    tile_k = min(tile_size // (2 if weight.numel() <= 2**22 else 4), 1 << (k - 1).bit_length())
    tiles = Tiles(tile_size // tile_k, tile_k, stages=3, warps=4)
    # so few that more programs run at once; other products would spill
    constants = dict(K=k, TILES=tiles, GATED=gated, maxnreg=64 if k <= tile_k and not gated else None)
    launch(_gemv_kernel, (-(-n // tiles.tile_n),), x.device, shared)(
        inputs, (weight, bias, norm_weight), out, n, eps, **constants, num_warps=tiles.warps
    )
    return out, inputs.total

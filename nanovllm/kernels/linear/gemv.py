"""One kernel that computes a norm, y = x W^T + b and an activation, for a single row x."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import Activation
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.activate import activate
from nanovllm.kernels.linear.row_adapters import RowAdapters, compute_h, load_row, part_of, result_of_row
from nanovllm.kernels.linear.tiles import NO_NORM, Tiles

MAX_OUTPUTS = 16  # of a program, with an adapter; a power of two


class Inputs(NamedTuple):
    """The tensors from which the kernel computes its input row."""

    x: torch.Tensor
    residual: torch.Tensor | None
    total: torch.Tensor  # receives x + residual


@triton.jit
def _load_if(ptr, at, inside, OTHERWISE: tl.constexpr):
    """Return elements of a norm's weight or of a bias, or OTHERWISE if the tensor is missing."""
    return tl.load(ptr + at, inside, 0.0).to(tl.float32) if ptr is not None else OTHERWISE


@triton.jit
def _load_input(x_ptrs, norm_weight, k, inside, program):
    """Return a tile of the input row times the norm's weight, and a tile of the squared row.

    Program 0 stores x + residual.
    """
    x = tl.load(x_ptrs.x + k, inside, 0.0).to(tl.float32)
    if x_ptrs.residual is not None:
        total = x + tl.load(x_ptrs.residual + k, inside, 0.0).to(tl.float32)
        total = total.to(x_ptrs.total.dtype.element_ty)
        if program == 0:
            tl.store(x_ptrs.total + k, total, inside)
        x = total.to(tl.float32)
    return (x * norm_weight)[None, :], x * x


@dependent_kernel(early=("w_ptrs", "adapter_ptrs"))
@triton.jit
def _gemv_kernel(
    x_ptrs,
    w_ptrs,
    adapter_ptrs,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    TILES: tl.constexpr,
    ACT: tl.constexpr,
    ADAPTER: tl.constexpr,
    NUM_OF_H: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program computes tile_n outputs, and reads the input row in tiles of tile_k inputs. With an adapter, the first
    # NUM_OF_H programs compute h.
    gdc_launch_dependents(PDL)
    GATED: tl.constexpr = ACT is not None
    w_ptr, bias_ptr, norm_ptr = w_ptrs
    program = tl.program_id(0)
    if adapter_ptrs is not None:
        program -= NUM_OF_H
        if program < 0:
            compute_h(adapter_ptrs, x_ptrs.residual, norm_ptr, program + NUM_OF_H, 1, ADAPTER, PDL)
            return
    n = program * TILES.tile_n + tl.arange(0, TILES.tile_n)
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
    if adapter_ptrs is not None:
        NUM_OUTPUTS = 2 * N if GATED else N
        part = part_of(adapter_ptrs, program * TILES.tile_n, ADAPTER)  # all outputs of a program belong to one part
        adapter = load_row(adapter_ptrs, part, n, n < N, NUM_OUTPUTS, ADAPTER)
        if GATED:
            up_adapter = load_row(adapter_ptrs, 1, N + n, n < N, NUM_OUTPUTS, ADAPTER)
    gdc_wait(PDL)
    x, squares = _load_input(x_ptrs, norm_weight, k, k < K, program)
    acc = w_tile * x
    if GATED:
        up_acc = up_tile * x
    for begin in tl.range(TILES.tile_k, K, TILES.tile_k, num_stages=TILES.stages):
        at = begin + k
        inside = rows & (at < K)[None, :]
        x, more = _load_input(x_ptrs, _load_if(norm_ptr, at, at < K, 1.0), at, at < K, program)
        squares += more
        acc += tl.load(w + begin, inside, 0.0, eviction_policy="evict_first").to(tl.float32) * x
        if GATED:
            up_acc += tl.load(up + begin, inside, 0.0, eviction_policy="evict_first").to(tl.float32) * x
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if norm_ptr is not None else 1.0
    y = tl.sum(acc, 1)
    if adapter_ptrs is not None:
        y += result_of_row(adapter_ptrs, adapter, program, ADAPTER)
    y = y * scale + bias
    if GATED:
        up_y = tl.sum(up_acc, 1)
        if adapter_ptrs is not None:
            up_y += result_of_row(adapter_ptrs, up_adapter, program, ADAPTER)
        up_y = up_y * scale + up_bias
        y = activate(y, up_y, ACT)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), n < N)


def gemv_tiles(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> Tiles:
    tile_size = (8192 if gated else 16384) // x.element_size()  # in weights; with `gated`, two tiles are loaded
    # for the shortest matmuls, programs load as much as they can before they wait
    tile_k = tile_size // (2 if weight.numel() <= 2**22 else 4)
    tile_k = min(tile_k, 1 << (weight.shape[1] - 1).bit_length())
    return Tiles(tile_size // tile_k, tile_k, stages=3, warps=4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm=NO_NORM,
    residual=None,
    act: Activation | None = None,
    bias=None,
    out=None,
    adapters: RowAdapters | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a single row x, store y = x W^T + bias in `out`. Return y and x + residual.

    The shapes are x [1, K], W [N, K], `bias` [N] and y [1, N]. All tensors are contiguous. `norm` is a pair: the weight
    [K] and the eps of an RMS norm. If `norm` is given, the norm of x + residual replaces x in the matmul. A residual
    requires a norm. Without a residual, the second result is x. If `act` is given, W is [2 * N, K], `bias` is [2 * N],
    and y is the gated activation of all outputs. The results of `adapters`, which multiply the same x, are added before
    the activation. The number of outputs of each part of an adapter is a multiple of MAX_OUTPUTS.
    """
    norm_weight, eps = norm
    assert norm_weight is not None or residual is None
    n, k = weight.shape[0] // (2 if act else 1), weight.shape[1]
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    inputs = Inputs(x, residual, x if residual is None else torch.empty_like(x))
    # Short matmuls gain from overlapping kernels. For long matmuls, 75% of the memory holds four programs of 40 KB
    # each. The driver would choose a different percentage for each kernel.
    shared = 50 if weight.numel() <= 2**23 else 75
    tiles = gemv_tiles(x, weight, act is not None)
    # with few registers, more programs fit; with larger tiles, registers would spill
    registers = 64 if k <= tiles.tile_k and act is None else None
    shape, num_of_h = None, 0
    if adapters is not None:
        tiles = tiles._replace(tile_n=min(MAX_OUTPUTS, tiles.tile_n))
        shape, num_of_h, registers = adapters.shape, adapters.num_programs, 168 if act else 128
    constants = dict(K=k, TILES=tiles, ACT=act, ADAPTER=shape, NUM_OF_H=num_of_h, maxnreg=registers)
    launch(_gemv_kernel, (num_of_h - -n // tiles.tile_n,), x.device, shared)(
        inputs, (weight, bias, norm_weight), adapters, out, n, eps, **constants, num_warps=tiles.warps
    )
    return out, inputs.total

"""y = x W^T + b for a single row of x, where W is 8-bit values times scales of blocks; as gemv.py for other weights."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.fp8 import decode_e4m3
from nanovllm.kernels.gemv import load_input
from nanovllm.kernels.scaled_tiles import as_loadable, block_shape

TILE_SIZE = 16384  # weights that a program multiplies at a time, half of them from each half of a gated product
MAX_TILE_K = 4096
FEW_WEIGHTS = 2**23  # take smaller tiles, for more programs


@triton.jit
def columns_of_lanes(TILE_K: tl.constexpr, GROUP: tl.constexpr, LANE: tl.constexpr):
    """The columns of a tile as [groups that share a scale, parts, LANE]; a thread loads the LANE of a part at once."""
    group = tl.arange(0, TILE_K // GROUP)
    part = tl.arange(0, GROUP // LANE)
    return group[:, None, None] * GROUP + part[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]


@triton.jit
def multiply_groups(w, x, scale_ptr, group, num_groups, HAS_SCALES: tl.constexpr):
    """Sums [TILE_N, groups, parts] of a tile of weights times x [1, groups, parts, LANE].

    Each is over the weights that a thread has loaded at once, so that few registers and no other thread take part; and
    is multiplied by the scale of its group.
    """
    y = tl.sum(decode_e4m3(w, tl.float32) * x, 3)
    if HAS_SCALES:
        y *= tl.load(scale_ptr + group, group < num_groups, 0.0)
    return y


@dependent_kernel(early=("w_ptr", "scale_ptr", "bias_ptr"))
@triton.jit
def _scaled_gemv_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    norm_weight_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # with one block along K, its scales multiply the result; otherwise a group of inputs is a block, with one scale for
    # all rows of the tile
    COLUMNS: tl.constexpr = K // BLOCK_K
    BY_GROUP: tl.constexpr = COLUMNS > 1
    GROUP: tl.constexpr = BLOCK_K if BY_GROUP else TILE_K
    LANE: tl.constexpr = 16 if GROUP >= 16 else GROUP  # weights in the largest load of a thread
    first_n = tl.program_id(0) * TILE_N
    n = first_n + tl.arange(0, TILE_N)
    group = tl.arange(0, TILE_K // GROUP)
    k = columns_of_lanes(TILE_K, GROUP, LANE)
    group = group[None, :, None]
    is_row = (n < N)[:, None, None, None]
    w = w_ptr + n[:, None, None, None].to(tl.int64) * K + k[None, :]
    up = w + N * K
    if BY_GROUP:
        row_scales = scale_ptr + first_n // BLOCK_N * COLUMNS
        up_row_scales = scale_ptr + (N + first_n) // BLOCK_N * COLUMNS
    else:
        row_scales = scale_ptr
        up_row_scales = scale_ptr
        scales = tl.load(scale_ptr + n // BLOCK_N, n < N, 0.0)
        if GATED:
            up_scales = tl.load(scale_ptr + (N + n) // BLOCK_N, n < N, 0.0)
    # load the first tiles of W while the kernel before still runs
    tile = tl.load(w, is_row & (k < K)[None, :], 0.0)
    if GATED:
        up_tile = tl.load(up, is_row & (k < K)[None, :], 0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = tl.zeros([TILE_N, TILE_K // GROUP, GROUP // LANE], tl.float32)
    up_acc = tl.zeros([TILE_N, TILE_K // GROUP, GROUP // LANE], tl.float32)
    squares = tl.zeros([TILE_K // GROUP, GROUP // LANE], tl.float32)
    for begin in tl.static_range(0, K, TILE_K):  # unrolled: the loads of several tiles are in flight
        at, at_group = begin + k, begin // GROUP + group
        inside = at < K
        x, more = load_input(x_ptr, residual_ptr, sum_ptr, norm_weight_ptr, at, inside, HAS_NORM, HAS_RESIDUAL)
        squares += tl.sum(more, 2)
        if begin > 0:
            tile = tl.load(w + begin, is_row & inside[None, :], 0.0)
            if GATED:
                up_tile = tl.load(up + begin, is_row & inside[None, :], 0.0)
        acc += multiply_groups(tile, x, row_scales, at_group, COLUMNS, BY_GROUP)
        if GATED:
            up_acc += multiply_groups(up_tile, x, up_row_scales, at_group, COLUMNS, BY_GROUP)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if HAS_NORM else 1.0
    y = tl.sum(tl.sum(acc, 2), 1) * scale
    if not BY_GROUP:
        y *= scales
    if HAS_BIAS:
        y += bias
    if GATED:
        up_y = tl.sum(tl.sum(up_acc, 2), 1) * scale
        if not BY_GROUP:
            up_y *= up_scales
        if HAS_BIAS:
            up_y += up_bias
        y = y / (1.0 + tl.exp(-y)) * up_y
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), n < N)


def scaled_gemv(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemv` with a weight of values [N, K] (or [2N, K]) times scales [N / block rows, K / block columns].

    A border of blocks lies between the two halves of a gated product. Blocks that divide K have powers of two as sizes.
    """
    assert norm_weight is not None or residual is None
    n, k = values.shape[0] // (2 if gated else 1), values.shape[1]
    block_n, block_k = block_shape(values, scales)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    summed = x if residual is None else torch.empty_like(x)
    tile_size = TILE_SIZE // (2 if gated else 1) // (2 if values.numel() <= FEW_WEIGHTS else 1)
    tile_k = min(MAX_TILE_K, triton.next_power_of_2(k))
    tile_n = tile_size // tile_k
    if block_k < k:  # all rows of a tile have the same scales
        tile_n = min(tile_n, block_n)
    # as for gemv: short products gain from overlapping kernels
    shared = 50 if values.numel() <= 2**24 else None
    launch(_scaled_gemv_kernel, (triton.cdiv(n, tile_n),), x.device, shared)(
        x,
        residual,
        summed,
        norm_weight,
        as_loadable(values),
        scales,
        bias,
        out,
        n,
        eps,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TILE_N=tile_n,
        TILE_K=tile_k,
        HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=8 if tile_n * tile_k * (2 if gated else 1) == TILE_SIZE else 4,
    )
    return out, summed

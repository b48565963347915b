"""Computes y = x W^T + b, where no bit of a row of y depends on the number of rows.

Each output is a single sum, whose terms are added in the order of the inputs. The tensor core instructions for 64 rows
add 16-bit products in the same way for every tile size. In this kernel, the 64 rows are rows of the weight, so a tile
may have any number of rows of x. If weights have 8 bits, sums are multiplied by scales after a number of inputs that is
the same for every tile size.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import has_tma, num_sms
from nanovllm.kernels.linear.tiles import (
    QuantizedRows,
    Tiles,
    Weight,
    add_product,
    load_tile,
    operands_of,
    times_scales,
)

GROUP_M = tl.constexpr(8)  # consecutive tiles of rows that use the same tile of weights
FEW_OUTPUTS = 1024, 4096  # numbers of outputs up to which tiles have fewer rows than x, so that there are enough tiles

# by the rows of x in a tile
TILES = {m: Tiles(64, 128, 6, 4, m) for m in (16, 32, 64)} | {128: Tiles(64, 128, 4, 4, 128)}
WIDE_128 = Tiles(128, 64, 4, 4, 128)
WIDE_256 = Tiles(128, 64, 4, 8, 256)
SCALED_TILES = {m: Tiles(64, 128, 6 if m <= 32 else 4, 4, m) for m in (16, 32, 64, 128)}
FLOAT32 = {m: Tiles(32, 32, 3, 4, m) for m in (16, 32, 64)}  # without tensor cores, for tests


@dependent_kernel()
@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x_tiles, w_tiles, scale_ptrs, bias_ptr, out_ptr, M, N, SHAPE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr
):
    # A program computes an output tile [tile_m, tile_n] over all inputs.
    gdc_launch_and_wait(PDL)
    tiles_per_group = GROUP_M * tl.cdiv(N, TILES.tile_n)
    first_tile = tl.program_id(0) // tiles_per_group * GROUP_M
    group_size = tl.minimum(tl.cdiv(M, TILES.tile_m) - first_tile, GROUP_M)
    index = tl.program_id(0) % tiles_per_group
    first_m, first_n = (first_tile + index % group_size) * TILES.tile_m, index // group_size * TILES.tile_n
    m = first_m + tl.arange(0, TILES.tile_m)
    n = first_n + tl.arange(0, TILES.tile_n)
    x_scales = scale_ptrs.x, m, m < M, scale_ptrs.x_stride
    w_scales = scale_ptrs.w, first_n, N
    # transposed, because tensor cores multiply 64 rows at a time: W has many rows, but x may have few
    acc = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for begin in tl.range(0, SHAPE.k, TILES.tile_k, num_stages=TILES.stages):
        w = load_tile(w_tiles, first_n, begin, n < N, SHAPE.k, TILES)
        x = load_tile(x_tiles, first_m, begin, m < M, SHAPE.k, TILES).T
        acc = add_product(acc, w, x, x_scales, w_scales, begin, SHAPE, TILES)
    acc = times_scales(acc, x_scales, w_scales, 0, SHAPE, TILES, True)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty).T, (m < M)[:, None] & (n < N)[None, :])


def _choose_tiles(num_rows: int, num_outputs: int, is_scaled: bool, is_float32: bool, device: torch.device) -> Tiles:
    """Choose the tile sizes that were fastest on an H100. All tile sizes give the same results."""
    size = max(16, triton.next_power_of_2(num_rows))
    if is_scaled or is_float32:
        table = SCALED_TILES if is_scaled else FLOAT32
        return table[min(size, max(table))]
    few, more = FEW_OUTPUTS
    if num_rows <= 64:
        return TILES[size]
    if num_rows <= 256:
        if num_outputs <= (few if num_rows > 128 else more):
            return TILES[64]
        return TILES[128] if num_rows <= 128 or num_outputs <= more else WIDE_128
    num_tiles = triton.cdiv(num_rows, WIDE_256.tile_m) * triton.cdiv(num_outputs, WIDE_256.tile_n)
    return WIDE_256 if num_tiles >= num_sms(device) else WIDE_128


def invariant_product(
    x: torch.Tensor | QuantizedRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Store x W^T + bias in `out` [M, N], and return `out`. The operands are x [M, K], W [N, K] and `bias` [N].

    W may consist of 8-bit values and scales [N / block rows, K / block columns], with blocks of at least 32 columns.
    All tensors are contiguous. The size of each row of x and W is a multiple of 16 bytes.
    """
    rows, values, scales, shape = operands_of(x, weight)
    (n, k), m, device, is_scaled = values.shape, len(x), values.device, isinstance(weight, tuple)
    out = torch.empty((m, n), dtype=x.dtype, device=device) if out is None else out
    if m == 0:
        return out
    tiles = tiles or _choose_tiles(m, n, is_scaled, x.dtype == torch.float32, device)
    if shape.block_k < k:  # a tile must lie in one block
        tiles = tiles._replace(tile_k=min(tiles.tile_k, shape.block_k & -shape.block_k))
    if has_tma(device) and k * values.element_size() % 16 == 0 and (x.dtype != torch.float32 or not is_scaled):
        rows = TensorDescriptor.from_tensor(rows, [tiles.tile_m, tiles.tile_k])
        values = TensorDescriptor.from_tensor(values, [tiles.tile_n, tiles.tile_k])
    else:
        tiles = tiles._replace(stages=min(3, tiles.stages), tma=False)
    num_tiles = triton.cdiv(m, tiles.tile_m) * triton.cdiv(n, tiles.tile_n)
    launch(_product_kernel, (num_tiles,), device, shared=50 if tiles.tile_m == 16 else 100)(
        rows, values, scales, bias, out, m, n, SHAPE=shape, TILES=tiles, num_warps=tiles.warps
    )
    return out

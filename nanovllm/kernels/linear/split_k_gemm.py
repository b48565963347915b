"""Computes y = x W^T for small batches. The elements of W have 16 or 8 bits.

If the output tiles do not fill the GPU, K is split.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, has_tma, num_sms
from nanovllm.kernels.linear.row_adapters import (
    RowAdapters,
    add_results,
    compute_h,
    has_adapters,
    load_columns,
    load_h,
    part_of,
)
from nanovllm.kernels.linear.tiles import (
    QuantizedRows,
    Tiles,
    Weight,
    add_product,
    load_tile,
    operands_of,
    times_scales,
)

FEW_WEIGHTS = 5 * 2**20
MAX_ROWS = 256  # 128 if there are more than FEW_WEIGHTS weights, except in hopper_gemm.py, whose tiles are larger
TILE_N = 64
TILE_K = 128
LONE_BYTES = 2**17  # bytes that a program has in flight if it is alone on its multiprocessor


@dependent_kernel(early=("adapter_ptrs",))
@triton.jit(do_not_specialize=["M", "num_of_h"])
def _split_k_kernel(
    x_tiles,
    w_tiles,
    scale_ptrs,
    adapter_ptrs,
    out_ptr,
    M,
    N,
    num_of_h,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    ADAPTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program computes an output tile [tile_m, tile_n] over the inputs of one split. With adapters, there is one tile
    # of rows, and the first num_of_h programs compute h.
    gdc_launch_dependents(PDL)
    tile = tl.program_id(0)  # innermost, so that the tiles of the same rows of x run together
    split = tl.program_id(2)
    if adapter_ptrs is not None:
        if tile < num_of_h:
            if split == 0:
                compute_h(adapter_ptrs, None, None, tile, M, ADAPTERS, PDL)
            return
        tile -= num_of_h
    first_n = tile * TILES.tile_n
    first_m = tl.program_id(1) * TILES.tile_m
    m = first_m + tl.arange(0, TILES.tile_m)
    n = first_n + tl.arange(0, TILES.tile_n)
    if adapter_ptrs is not None:
        part = part_of(adapter_ptrs, first_n, ADAPTERS)
        adds = has_adapters(adapter_ptrs, M) & (split == 0)
        columns = load_columns(adapter_ptrs, 0, part, n, n < N, N, tl.where(adds, M, 0), ADAPTERS)
    gdc_wait(PDL)
    if adapter_ptrs is not None:
        bits = load_h(columns[1], columns[2])
    x_scales = scale_ptrs.x, m, m < M, scale_ptrs.x_stride
    w_scales = scale_ptrs.w, first_n, N
    # transposed, because tensor cores multiply 64 rows at a time: W has many rows, but x may have few
    acc = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    first_k = split * SHAPE.k_per_split
    end_k = tl.minimum(first_k + SHAPE.k_per_split, SHAPE.k)
    for begin in tl.range(first_k, end_k, TILES.tile_k, num_stages=TILES.stages):
        w = load_tile(w_tiles, first_n, begin, n < N, SHAPE.k, TILES)
        x = load_tile(x_tiles, first_m, begin, m < M, SHAPE.k, TILES).T
        acc = add_product(acc, w, x, x_scales, w_scales, begin, SHAPE, TILES)
    acc = times_scales(acc, x_scales, w_scales, 0, SHAPE, TILES, True)
    if adapter_ptrs is not None:
        acc = add_results(acc, adapter_ptrs, bits, columns, adds, part, n, n < N, N, M, ADAPTERS)
    out = out_ptr + (split * M + m[:, None]) * N + n[None, :]
    tl.store(out, acc.T.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def tile_m_of(num_rows: int) -> int:
    """Return the number of rows of x per tile, a power of two from 16 to 128."""
    return min(128, max(16, 1 << (num_rows - 1).bit_length()))


def _tile_m(m: int, weight: torch.Tensor) -> int:
    return 64 if 64 < m < MAX_ROWS and weight.numel() <= FEW_WEIGHTS else tile_m_of(m)


def _is_for_hopper(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether hopper_gemm.py should compute this GEMM when K is split.

    If there are at most twice as many inputs as outputs, adding the summands takes as much time as the split saves.
    """
    is_large = MAX_ROWS // 2 < len(x) <= MAX_ROWS and weight.numel() > FEW_WEIGHTS
    return is_large and weight.shape[1] > 2 * len(weight) and x.dtype != torch.float32 and has_hopper_kernels()


def choose_split_k(x: torch.Tensor, weight: torch.Tensor, max_split_k: int) -> int:
    """Return the best `split_k` up to `max_split_k` for `split_k_gemm`, or 0 if cuBLAS should compute the matmul."""
    (m, k), n = x.shape, weight.shape[0]
    if not has_tma(x.device) or x.dtype == torch.float32 or not 0 < m <= MAX_ROWS or k % 8:
        return 0
    sms, few, tile_m = num_sms(x.device), weight.numel() <= FEW_WEIGHTS, _tile_m(m, weight)
    if _is_for_hopper(x, weight):
        num_tiles = -(-n // (2 * TILE_N))
        split_k = min(max_split_k, sms // num_tiles)
        return split_k if split_k > 1 and split_k * num_tiles > 0.95 * sms else 0
    num_tiles = -(-n // TILE_N) * -(-m // tile_m)
    split_k = min(max_split_k, sms // num_tiles)
    if m <= 64 and num_tiles > 0.9 * -(-num_tiles // sms) * sms:  # even the last wave of tiles fills the GPU
        return max(1, split_k)
    # TMA is slow with partial tiles of x. The library is fast if its tiles fill half to two thirds of the GPU.
    tiles_are_full = m <= 64 or m % tile_m == 0 or (few and max_split_k > 1)
    is_faster = few or (m <= MAX_ROWS // 2 and not sms < 2 * split_k * num_tiles < 1.4 * sms)
    return split_k if tiles_are_full and is_faster else 0


def scaled_tiles(num_rows: int, columns: int, sms: int) -> Tiles:
    """Return the tiles for 8-bit weights. `columns` is the number of outputs times the number of splits.

    A multiprocessor runs two programs at a time. If there is at most one program per multiprocessor, each program keeps
    more loads in flight. For 17 to 64 rows, tiles get double width if more than 90% of the multiprocessors still get
    one such tile, and none gets two. Tiles of double width halve the reads of x.
    """
    tile_m = tile_m_of(num_rows)
    tile_n = 2 * TILE_N if 16 < num_rows <= 64 and 0.9 * sms < columns / (2 * TILE_N) <= sms else TILE_N
    is_lone = columns * -(-num_rows // tile_m) <= sms * tile_n
    stages = LONE_BYTES // (TILE_K * (tile_n + tile_m)) if is_lone else 6 if tile_m <= 32 else 4
    return Tiles(tile_n, TILE_K, stages, 4, tile_m)


def _tiles(num_rows: int, weight: torch.Tensor) -> Tiles:
    tile_m = _tile_m(num_rows, weight)
    if tile_m == 16 and weight.numel() > FEW_WEIGHTS:
        return Tiles(TILE_N, 2 * TILE_K, 3, 4, tile_m)
    return Tiles(TILE_N, TILE_K, 6 if tile_m in (32, 64) else 4, 4, tile_m)


def split_k_gemm(
    x: torch.Tensor | QuantizedRows,
    weight: Weight,
    split_k: int = 1,
    out: torch.Tensor | None = None,
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    """Store summands of x W^T in `out` [split_k, M, N], and return `out`. The operands are x [M, K] and W [N, K].

    W may consist of 8-bit values and scales [N / block rows, K / block columns], with blocks of at least 32 columns. If
    W has 8-bit values, x may be quantized to e4m3 on GPUs with FP8 units. If x is not quantized, the kernel converts
    8-bit weights to the dtype of x. All tensors are contiguous, and the size of a row is a multiple of 16 bytes. The
    results of `adapters` are added to the first summand. With `adapters`, x has 16-bit elements and at most 16 rows,
    and the numbers of outputs of all parts are multiples of TILE_N.
    """
    is_scaled = isinstance(weight, tuple)
    if not is_scaled and split_k > 1 and _is_for_hopper(x, weight):
        from nanovllm.kernels.hopper.hopper_gemm import hopper_gemm  # it needs Gluon of Triton 3.6

        return hopper_gemm(x, weight, split_k, out)
    rows, values, scales, shape = operands_of(x, weight)
    m, (n, k), device = len(x), values.shape, values.device
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=device) if out is None else out
    tiles = scaled_tiles(m, n * split_k, num_sms(device)) if is_scaled else _tiles(m, values)
    if adapters is not None:
        tiles = tiles._replace(tile_k=TILE_K, stages=6)  # so that the last tile of inputs takes less time
    if shape.block_k < k:  # a tile must lie in one block
        tiles = tiles._replace(tile_k=min(tiles.tile_k, shape.block_k & -shape.block_k))
    if is_scaled and not (has_tma(device) and k % 16 == 0 and x.dtype != torch.float32):
        tiles = tiles._replace(tile_n=TILE_N, stages=3, tma=False)
    shape = shape._replace(k_per_split=-(-k // (split_k * tiles.tile_k)) * tiles.tile_k)
    if tiles.tma:
        rows = TensorDescriptor.from_tensor(rows, [tiles.tile_m, tiles.tile_k])
        values = TensorDescriptor.from_tensor(values, [tiles.tile_n, tiles.tile_k])
    # the smallest 16-bit tiles use half of the memory as shared memory, as the neighbouring kernels do: see `launch`
    adapters_shape, num_of_h = (None, 0) if adapters is None else (adapters.shape, adapters.num_programs)
    grid = num_of_h - -n // tiles.tile_n, -(-m // tiles.tile_m), split_k
    run = launch(_split_k_kernel, grid, device, shared=50 if tiles.tile_m == 16 and not is_scaled else 100)
    constants = dict(SHAPE=shape, TILES=tiles, ADAPTERS=adapters_shape, num_warps=tiles.warps)
    run(rows, values, scales, adapters, out, m, n, num_of_h, **constants)
    return out

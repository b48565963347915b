"""The Hopper version of split_k_gemm.py for 129 to 256 rows, written in Gluon.

One warp loads tiles, and two warpgroups multiply them. A tile combines 128 rows of the weight (64 for each warpgroup)
with all tokens, so each weight is read once. The tokens are split into two tensors, because tensor sizes must be powers
of two. A quarter of the registers stays free for programs of the previous and the next kernel.

This kernel is for GEMMs with many more inputs than outputs, such as down_proj. For other GEMMs, cuBLAS is as fast.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.hopper.hopper_ring import (
    barriers,
    buffers,
    gdc_launch_dependents,
    gdc_wait,
    store_transposed,
    sums_of,
    tiles_of,
)
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch

TILE_N = gl.constexpr(128)  # rows of the weight
FIRST = gl.constexpr(128)  # tokens of the first part
TILE_K = gl.constexpr(64)  # inputs per buffer; a row of them has 128 bytes
SHARED_BYTES = 218 * 2**10  # of all buffers; another 4 KiB hold outputs until they are stored


@gluon.jit
def _load_weights(i, w_tiles, rings, row, first_k, TOKENS: gl.constexpr, BUFFERS: gl.constexpr):
    """Start to load the weights for the i-th step along K."""
    weights, _, _, full, _ = rings
    buffer = i % BUFFERS
    mbarrier.expect(full.index(buffer), (TILE_N + TOKENS) * 2 * TILE_K)
    for group in gl.static_range(2):
        at = [row + group * 64, first_k + i * TILE_K]
        tma.async_copy_global_to_shared(w_tiles, at, full.index(buffer), weights[group].index(buffer))


@gluon.jit
def _load(tiles, rings, row, first_k, steps, TOKENS: gl.constexpr, BUFFERS: gl.constexpr):
    """Run the loading warp, which uses one thread."""
    w_tiles, first_tiles, second_tiles = tiles
    _, firsts, seconds, full, empty = rings
    for i in range(steps):
        buffer = i % BUFFERS
        if i >= BUFFERS:
            mbarrier.wait(empty.index(buffer), (i // BUFFERS & 1) ^ 1)
            _load_weights(i, w_tiles, rings, row, first_k, TOKENS, BUFFERS)
        k = first_k + i * TILE_K
        tma.async_copy_global_to_shared(first_tiles, [0, k], full.index(buffer), firsts.index(buffer))
        tma.async_copy_global_to_shared(second_tiles, [FIRST, k], full.index(buffer), seconds.index(buffer))


@gluon.jit
def _multiply(
    out_ptr, rings, row, steps, num_tokens, num_rows, GROUP: gl.constexpr, TOKENS: gl.constexpr, BUFFERS: gl.constexpr
):
    """Run one warpgroup: multiply 64 rows of the weight by all tokens."""
    weights, firsts, seconds, full, empty = rings
    SECOND: gl.constexpr = TOKENS - FIRST
    first = gl.full([64, FIRST], 0.0, gl.float32, sums_of(FIRST))
    second = gl.full([64, SECOND], 0.0, gl.float32, sums_of(SECOND))
    for i in range(steps):
        buffer = i % BUFFERS
        mbarrier.wait(full.index(buffer), i // BUFFERS & 1)
        w = weights[GROUP].index(buffer)
        first = hopper.warpgroup_mma(w, firsts.index(buffer).permute((1, 0)), first, is_async=True)
        second = hopper.warpgroup_mma(w, seconds.index(buffer).permute((1, 0)), second, is_async=True)
        first, second = hopper.warpgroup_mma_wait(2, deps=[first, second])  # for the previous two matmuls
        mbarrier.arrive(empty.index((i + BUFFERS - 1) % BUFFERS), count=1, pred=i > 0)
    first, second = hopper.warpgroup_mma_wait(0, deps=[first, second])
    store_transposed(out_ptr, first, row + GROUP * 64, 0, num_tokens, num_rows)
    store_transposed(out_ptr, second, row + GROUP * 64, FIRST, num_tokens, num_rows)


@dependent_kernel(early=("w_tiles",))
@gluon.jit(do_not_specialize=["num_tokens", "steps", "split_k"])
def _gemm_kernel(
    w_tiles,
    first_tiles,
    second_tiles,
    out_ptr,
    num_tokens,
    num_rows,
    steps,
    split_k,
    TOKENS: gl.constexpr,
    BUFFERS: gl.constexpr,
    PDL: gl.constexpr,
):
    # A program multiplies 128 rows of the weight by all tokens, over the inputs of one split.
    gdc_launch_dependents(PDL)
    weights = buffers(w_tiles, BUFFERS), buffers(w_tiles, BUFFERS)
    firsts, seconds = buffers(first_tiles, BUFFERS), buffers(second_tiles, BUFFERS)
    full, empty = barriers(BUFFERS, 1), barriers(BUFFERS, 2)
    rings = weights, firsts, seconds, full, empty
    split = gl.program_id(0) % split_k
    row, first_k = gl.program_id(0) // split_k * TILE_N, split * steps * TILE_K
    for i in range(gl.minimum(steps, BUFFERS)):
        _load_weights(i, w_tiles, rings, row, first_k, TOKENS, BUFFERS)
    gdc_wait(PDL)
    tiles = w_tiles, first_tiles, second_tiles
    part_ptr = out_ptr + split * num_tokens * num_rows
    gl.warp_specialize(
        [
            (_multiply, (part_ptr, rings, row, steps, num_tokens, num_rows, gl.constexpr(0), TOKENS, BUFFERS)),
            (_multiply, (part_ptr, rings, row, steps, num_tokens, num_rows, gl.constexpr(1), TOKENS, BUFFERS)),
            (_load, (tiles, rings, row, first_k, steps, TOKENS, BUFFERS)),
        ],
        [4, 1],  # warps of the second and the third partition
        [168, 40],  # registers of their threads
    )


def hopper_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `split_k_gemm` for 129 to 256 rows. The operands are x [rows, K] and a weight [N, K] in 16 bits."""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((split_k, m, n), dtype=x.dtype, device=x.device) if out is None else out
    second = max(16, triton.next_power_of_2(m - FIRST.value))
    tiles = (tiles_of(*tile, TILE_K.value) for tile in ((weight, 64), (x, FIRST.value), (x, second)))
    tokens = FIRST.value + second
    buffers = SHARED_BYTES // ((TILE_N.value + tokens) * 2 * TILE_K.value)
    steps = triton.cdiv(triton.cdiv(k, TILE_K.value), split_k)
    constants = dict(TOKENS=tokens, BUFFERS=buffers, num_warps=4, maxnreg=128)
    launch(_gemm_kernel, (triton.cdiv(n, TILE_N.value) * split_k,), x.device)(
        *tiles, out, m, n, steps, split_k, **constants
    )
    return out

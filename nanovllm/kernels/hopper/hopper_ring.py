"""Shared code of the Gluon kernels: a warp loads tiles into a ring of buffers for the warpgroups.

Each buffer has two barriers. The barrier `full` completes when all data has arrived, and `empty` completes when all
readers have finished. In the i-th use of a buffer, readers wait for parity `i & 1` of `full`. The loading warp waits
for parity `(i & 1) ^ 1` of `empty` before it fills the buffer.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def gdc_launch_dependents(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, pack=1)


@gluon.jit
def gdc_wait(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, pack=1)


def tiles_of(x: torch.Tensor, *shape: int) -> TensorDescriptor:
    """Return a TMA descriptor of x for tiles of the given shape. Rows are swizzled over up to 128 bytes."""
    size = x.element_size()
    layout = gl.NVMMASharedLayout(min(128, shape[-1] * size), 8 * size, len(shape))
    return TensorDescriptor.from_tensor(x, [*shape], layout)


@gluon.jit
def buffers(tiles, COUNT: gl.constexpr):
    SHAPE: gl.constexpr = [COUNT] + tiles.block_shape  # noqa: RUF005 (Gluon has no star)
    return gl.allocate_shared_memory(tiles.dtype, SHAPE, tiles.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers that complete after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    hopper.fence_async_shared()
    return bars


@gluon.constexpr_function
def sums_of(columns, bits=16):
    """Return the layout of a warpgroup's wgmma result [64, columns], for operands of `bits` bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.jit
def halves(sums):
    """Split sums [64, columns] into a left and a right half. No values move between threads."""
    return gl.reshape(sums, [64, 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def outputs_of(tokens):
    """Return the layout to store a tensor [tokens, 64]. Each thread stores 8 outputs of a token (16 bytes).

    If there are only 8 tokens, each thread stores 4 outputs.
    """
    registers = [[0, 1], [0, 2], [0, 4], *([1 << i, 0] for i in range(4, tokens.bit_length() - 1))]
    lanes = [[2, 0], [4, 0], [1, 0], [0, 8], [8, 0]]
    if tokens == 8:
        registers, lanes[4] = registers[:2], [0, 4]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16], [0, 32]], [], [tokens, 64])


@gluon.jit
def store_transposed(out_ptr, sums, row, first_token, num_tokens, num_rows):
    """Store a warpgroup's sums[i, token] in out[first_token + token, row + i], for all elements that exist in `out`."""
    LAYOUT: gl.constexpr = outputs_of(sums.shape[1])
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty).permute((1, 0)), LAYOUT)
    token = first_token + gl.arange(0, sums.shape[1], gl.SliceLayout(1, LAYOUT))
    n = row + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    exists = (token < num_tokens)[:, None] & (n < num_rows)[None, :]
    gl.store(out_ptr + token[:, None] * num_rows + n[None, :], out, exists)

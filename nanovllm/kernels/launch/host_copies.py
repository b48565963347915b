"""Kernels that copy from and to pinned host memory.

Copies by kernels need no copy engine, and CUDA graphs can contain the kernels.

Host memory consists of two buffers, [2, capacity] int32. The host prepares one buffer while the device uses the other.
`buffer_index` [1] int32, on the device, is the index of the device's current buffer.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import launch_ordinary


@triton.jit(do_not_specialize=["size"])
def _copy_from_host_kernel(out_ptr, host_ptr, buffer_index_ptr, size, capacity, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host_ptr + tl.load(buffer_index_ptr) * capacity + at, at < size, 0, volatile=True)
    tl.store(out_ptr + at, words, at < size)


@triton.jit(do_not_specialize=["size"])
def _copy_to_host_kernel(x_ptr, host_ptr, buffer_index_ptr, size, capacity, BLOCK: tl.constexpr):
    buffer_index = tl.load(buffer_index_ptr)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(host_ptr + buffer_index * capacity + at, tl.load(x_ptr + at, at < size, 0), at < size)
    tl.debug_barrier()  # until all threads have read the index
    tl.store(buffer_index_ptr, 1 - buffer_index)


def copy_from_host(out: torch.Tensor, host: torch.Tensor, buffer_index: torch.Tensor) -> None:
    """Fill `out` [n] int32 with the first n words of the device's current buffer in `host`."""
    block = 128  # one word per thread, so that a warp reads adjacent words
    grid = (triton.cdiv(len(out), block),)
    launch_ordinary(_copy_from_host_kernel, grid)(out, host, buffer_index, len(out), host.shape[1], BLOCK=block)


def copy_to_host(x: torch.Tensor, host: torch.Tensor, buffer_index: torch.Tensor) -> None:
    """Write `x` [n] int32 to the device's current buffer in `host`, then switch `buffer_index` to the other buffer."""
    launch_ordinary(_copy_to_host_kernel, (1,))(x, host, buffer_index, len(x), host.shape[1], BLOCK=512)

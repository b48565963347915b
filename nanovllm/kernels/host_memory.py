"""To and from pinned host memory by a kernel: inside a CUDA graph, and without a copy engine to wait for.

Host memory has two places [2, room], of which the host prepares one while the device works with the other; `turn` [1]
int32 on the device says which is the device's.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size"])
def _fetch_kernel(out_ptr, host_ptr, turn_ptr, size, room, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host_ptr + tl.load(turn_ptr) * room + at, at < size, 0, volatile=True)
    tl.store(out_ptr + at, words, at < size)


@triton.jit(do_not_specialize=["size"])
def _deliver_kernel(x_ptr, host_ptr, turn_ptr, size, room, BLOCK: tl.constexpr):
    turn = tl.load(turn_ptr)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(host_ptr + turn * room + at, tl.load(x_ptr + at, at < size, 0), at < size)
    tl.debug_barrier()  # all threads know the turn
    tl.store(turn_ptr, 1 - turn)


def fetch(out: torch.Tensor, host: torch.Tensor, turn: torch.Tensor) -> None:
    """Fill `out` [n] with the first n of the device's place in `host`; int32."""
    block = 1024
    _fetch_kernel[(triton.cdiv(len(out), block),)](out, host, turn, len(out), host.shape[1], BLOCK=block)


def deliver(x: torch.Tensor, host: torch.Tensor, turn: torch.Tensor) -> None:
    """Write `x` [n] to the device's place in `host`, and end its turn; int32."""
    _deliver_kernel[(1,)](x, host, turn, len(x), host.shape[1], BLOCK=512)

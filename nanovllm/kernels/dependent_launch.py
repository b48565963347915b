"""Programmatic dependent launch: a kernel's programs start while those of the kernel before it still run.

Every kernel that is launched so lets its successor start at once (`gdc_launch_dependents`), and waits until its
predecessor is over and its writes can be seen (`gdc_wait`). Each waits, and so a kernel that is over means that all before
it are. Before it waits a kernel writes nothing, and reads nothing but weights and what was written before the last kernel
that was launched in the ordinary way. So what it costs to start a kernel, and its first reads, hide behind the kernel
before. A constexpr that is off before Hopper.
"""

import ctypes
from functools import cache, partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "has_tma", "launch", "num_sms", "prefetch_rows"]


@triton.jit
def prefetch_rows(starts, SIZE: tl.constexpr):
    """Bring rows of SIZE elements, from each of a tensor of pointers on, to the L2 cache; nobody waits for them."""
    LINE: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    lines = starts[:, None] + tl.arange(0, (SIZE + LINE - 1) // LINE)[None, :] * LINE
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the device has what Hopper brought: dependent launch, loads of whole tiles (TMA), and 227 KB to share.

    Hopper and Blackwell for data centres; Blackwell's other chips share 99 KB, and are treated as those before.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def launch(kernel, grid: tuple[int, ...], device: torch.device, shared: int | None = 100):
    """kernel[grid], as a dependent launch where there is one: `launch(kernel, grid, device)(*arguments, **constants)`.

    `shared` is the percentage of a multiprocessor's memory that the kernel would have as shared memory, the rest being
    cache; None leaves it to the driver. Kernels overlap where they agree on it; those of a step of few rows need little.
    """
    if not has_tma(device):
        return partial(kernel[grid], PDL=False)

    def dependent(*arguments, **constants) -> None:
        compiled = kernel[grid](*arguments, PDL=True, launch_pdl=True, **constants)
        if shared is not None:
            _prefer_shared_memory(compiled.function, shared)

    return dependent


@cache
def _prefer_shared_memory(function: int, percentage: int) -> None:
    """Once for every compiled kernel. It is a hint: where it fails nothing is lost but speed."""
    attribute = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), attribute, percentage)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

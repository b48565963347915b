"""Programmatic dependent launch: a kernel's programs start while those of the kernel before it still run.

Every kernel that is launched so lets its successor start at once (`gdc_launch_dependents`), reads nothing but weights
until its predecessor is over and its writes can be seen (`gdc_wait`), and only then goes on. So what it costs to start
a kernel, and the first reads of weights, hide behind the kernel before. Hopper and later; a constexpr elsewhere.
"""
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "is_hopper", "launch_options", "num_processors", "prefetch_rows"]


@triton.jit
def prefetch_rows(starts, SIZE: tl.constexpr):
    """Bring rows of SIZE elements, from each of a tensor of pointers on, to the L2 cache; nobody waits for them."""
    LINE: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    lines = starts[:, None] + tl.arange(0, (SIZE + LINE - 1) // LINE)[None, :] * LINE
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has what Hopper brought: dependent launch, and loads of whole tiles (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict:
    """Keyword arguments of a launch: the kernel's constexpr PDL, and the launch attribute that goes with it."""
    return {"PDL": True, "launch_pdl": True} if is_hopper(device) else {"PDL": False}


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

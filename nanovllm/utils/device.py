"""What a CPU has."""

import os
from pathlib import Path

import torch

# the limits of a container's memory, in the two versions of cgroups
MEMORY_LIMITS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions for products of a 16-bit dtype, and PyTorch uses them.

    Emulated products take up to seven times as long as those of float32. Only those of a single row take as long, and
    less where memory is slow.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    # PyTorch's answer is yes for all of AVX-512, and right for other architectures
    is_x86 = torch.cpu._is_avx2_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (not is_x86 or torch.cpu._is_avx512_bf16_supported())


def cpu_memory() -> int:
    """The bytes of memory that this process may use: the machine's, or those of its container if they are fewer."""
    limits = [file.read_text().strip() for file in MEMORY_LIMITS if file.is_file()]  # a number, or "max"
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(int(x) for x in limits if x.isdigit())])

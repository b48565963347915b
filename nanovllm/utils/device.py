"""The state of a device around our work on it, and what a CPU has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch

# the limits of a container's memory, in the two versions of cgroups
MEMORY_LIMITS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` the current one, and suspend the caller's autocast, which would change our dtypes."""
    kind = device.type
    current = torch.cuda.device(device) if kind == "cuda" else nullcontext()
    with current, torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        yield


def zeros_on(device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros with the shape and dtype of a tensor on the meta device."""
    if device.type == "cuda" or not like.nbytes:
        return torch.zeros_like(like, device=device)
    # the system maps pages of numpy's zeros on first use
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


def becomes_idle(device: torch.device, timeout: float = 5.0) -> bool:
    """Whether the device's current stream is done within `timeout` seconds."""
    if device.type != "cuda":
        return True
    begin = perf_counter()
    with torch.cuda.device(device):
        while not torch.cuda.current_stream().query():
            if perf_counter() - begin > timeout:
                return False
            sleep(0.001)
    return True


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

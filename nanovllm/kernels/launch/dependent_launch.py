"""Programmatic dependent launch (PDL): the programs of a kernel start while the previous kernel still runs.

PDL hides a kernel's launch latency and the latency of the kernel's first reads. Every dependent kernel obeys this
contract:

- The kernel lets the next kernel start immediately (`gdc_launch_dependents`). The kernel then waits until the previous
  kernel is complete and its writes are visible (`gdc_wait`). A program without work may return without waiting, but at
  least one program must wait. When a kernel is complete, all earlier kernels are therefore complete too.
- Before the kernel waits, it writes nothing. Before its wait, the kernel may prefetch any address, but must not read
  memory that a running kernel writes. Before its wait, the kernel may read weights, and the results of kernels that
  were launched before the last ordinary launch.

An ordinary launch starts when all earlier kernels are complete. A dependent kernel can start while other kernels that
follow the last ordinary launch are running. Before its wait, a dependent kernel might not see the results of the last
ordinary launch.

The last ordinary launch before attention is the embedding, or a library kernel that follows the embedding, such as a
GEMM of cuBLAS. Before its wait, attention may therefore read `cos_sin`, the slot mapping, block tables and lengths,
because earlier launches have computed them. `@dependent_kernel(early=...)` declares what a kernel reads before its
wait. The decorator rejects a kernel that breaks the contract (launch_contract.py).

The constexpr `PDL` is `False` on GPUs older than Hopper, and with Triton 3.4, which can't compile its own `gdc`
functions.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import cache, partial
from threading import Lock

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from nanovllm.kernels.launch.gpu_features import has_tma
from nanovllm.kernels.launch.launch_contract import check_early_reads

IS_TRITON_3_4 = not hasattr(triton, "AsyncCompileMode")  # the oldest supported version

# callable inside kernels
next_power_of_2 = tl.constexpr_function(triton.next_power_of_2) if IS_TRITON_3_4 else triton.next_power_of_2


class DependentKernel:
    """A Triton kernel for `launch`. Raises AssertionError if the source breaks the contract."""

    __slots__ = ("jit",)

    def __init__(self, jit, early: tuple[str, ...]):
        check_early_reads(jit.fn, early)
        self.jit = jit


def dependent_kernel(early: tuple[str, ...] = ()) -> Callable[..., DependentKernel]:
    """Decorate a `triton.jit` kernel. `early` lists the pointer parameters that the kernel reads before it waits."""
    return partial(DependentKernel, early=early)


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_wait()


@triton.jit
def gdc_launch_and_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the previous kernel.

    A kernel that does nothing before its wait begins with a call of this function.
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)


_launched: ContextVar[list | None] = ContextVar("launched", default=None)  # kernels launched in `compile_only`


class _Loaders(ThreadPoolExecutor):
    """A pool of threads that compile kernels and load them onto the device.

    To load a kernel, Triton 3.6 also compiles a C module. The C modules of all kernels have the same name, so a lock
    ensures that only one kernel is loaded at a time.
    """

    lock = Lock()

    def submit(self, compile_kernel):
        def load():
            kernel = compile_kernel()
            with self.lock:
                kernel.run  # noqa: B018 (the attribute loads the kernel)
            return kernel

        return super().submit(load)


def compile_only(work: Callable[[], None]) -> None:
    """Call `work`, but only compile the kernels that `work` launches, instead of running them.

    Parallel threads compile the kernels, because the compiler rarely holds the GIL.

    The outputs of the kernels contain arbitrary values. This function returns when all kernels are loaded onto the
    device, or raises the compiler's error.

    With Triton 3.4, this function does nothing, and each kernel is compiled at its first launch.
    """
    if IS_TRITON_3_4:
        return

    def compile_in_threads() -> None:
        _launched.set(launched := [])
        active = triton.runtime.driver.active
        on_device = {"initializer": active.set_current_device, "initargs": (active.get_current_device(),)}
        try:
            with _Loaders(os.cpu_count(), **on_device) as pool, triton.AsyncCompileMode(pool):
                work()
        except BaseException:
            _forget_unfinished(launched)
            raise

    # In CPython 3.11 before 3.11.8, ast.parse fails if garbage is collected while several threads parse
    # (python/cpython#106905).
    collects = gc.isenabled()
    gc.disable()
    try:
        copy_context().run(compile_in_threads)  # so that no setting of the mode outlives the call
    finally:
        if collects:
            gc.enable()


def _forget_unfinished(launched: list) -> None:
    """Delete the futures of kernels that failed to compile.

    Triton before 3.9 would treat a failed kernel as compiled.
    """
    for jit in launched:
        for kernels, *_ in jit.device_caches.values():
            for key in [key for key, kernel in kernels.items() if hasattr(kernel, "result")]:
                del kernels[key]


def launch(kernel: DependentKernel, grid: tuple[int, ...], device: torch.device, shared: int | None = 100):
    """Return `kernel[grid]`, as a dependent launch if the device supports it.

    Usage: `launch(kernel, grid, device)(*arguments, **constants)`.

    `shared` is the percentage of a multiprocessor's L1 memory that is used as shared memory, not as cache. If `shared`
    is `None`, the driver chooses. Kernels overlap only if they have the same value of `shared`. Kernels for small
    batches need little shared memory.
    """
    run = launch_ordinary(kernel.jit, grid)
    if not has_tma(device) or IS_TRITON_3_4:
        return partial(run, PDL=False)

    def dependent(*arguments, **constants) -> None:
        compiled = run(*arguments, PDL=True, launch_pdl=True, **constants)
        if shared is not None and _launched.get() is None:
            _prefer_shared_memory(compiled.function, shared)

    return dependent


def launch_ordinary(jit, grid: tuple[int, ...]):
    """Return `jit[grid]` as an ordinary launch, which starts when all earlier kernels are complete."""
    if (launched := _launched.get()) is not None:
        launched.append(jit)
    # overflow checks make Triton's parser a quarter slower, although the compiler drops them later
    return partial(jit.run, grid=grid, warmup=launched is not None, sanitize_overflow=False)


@cache
def _prefer_shared_memory(function: int, percentage: int) -> None:
    """Set a compiled kernel's preferred percentage of shared memory.

    The percentage is only a hint, so errors are ignored.
    """
    attribute = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), attribute, percentage)

"""Programmatic dependent launch: the programs of a kernel start while those of the kernel before it still run.

So the launch of a kernel and its first reads overlap with the kernel before it. The contract:

- A dependent kernel lets its successor start at once (`gdc_launch_dependents`), and waits (`gdc_wait`) until the kernel
  before it is complete and its writes are visible. A program without work may return without waiting, but not all may.
  Thus when a kernel is complete, so are all before it.
- Before it waits it writes nothing, prefetches what it likes, and reads only what no running kernel may still write:
  weights, and what was launched before the last ordinary launch. An ordinary launch starts when everything before it is
  complete, but a dependent kernel may start while several before it still run, back to the last ordinary one, whose own
  writes it may not see either.

In a forward the last ordinary launch before attention is the embedding, or a later library kernel. What came before it
may be read early: the rope lookup (cos_sin), slot mapping, block tables and lengths. `@dependent_kernel(early=...)`
declares what a kernel reads early, and refuses a kernel that does not keep to this: launch_contract.py.

PDL is a constexpr that is off before Hopper, and with Triton 3.4, whose own gdc functions it can't compile.
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

IS_TRITON_3_4 = not hasattr(triton, "AsyncCompileMode")  # the oldest that is supported

# for kernels
next_power_of_2 = tl.constexpr_function(triton.next_power_of_2) if IS_TRITON_3_4 else triton.next_power_of_2


class DependentKernel:
    """A Triton kernel that keeps the contract, for `launch`."""

    __slots__ = ("jit",)

    def __init__(self, jit, early: tuple[str, ...]):
        check_early_reads(jit.fn, early)
        self.jit = jit


def dependent_kernel(early: tuple[str, ...] = ()) -> Callable[..., DependentKernel]:
    """A decorator for a `triton.jit` kernel; `early` names the pointer parameters that it reads before it waits."""
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
    """The first line of a kernel that does nothing before it waits."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)


_launched: ContextVar[list | None] = ContextVar("launched", default=None)  # by this thread, in `compile_only`


class _Loaders(ThreadPoolExecutor):
    """Threads that compile kernels and load them to the device, for which Triton 3.6 also runs a C compiler.

    It loads its results as modules of the same name, into the same object of Python: one at a time.
    """

    lock = Lock()

    def submit(self, compile_kernel):
        def load():
            kernel = compile_kernel()
            with self.lock:
                kernel.run  # noqa: B018, loads it
            return kernel

        return super().submit(load)


def compile_only(work: Callable[[], None]) -> None:
    """Call `work`, and compile the kernels that it launches in other threads, all at the same time. None of them runs.

    What a kernel would have written keeps arbitrary values. Returns when all are compiled and loaded to the device; an
    error of the compiler is raised then. The compiler spends nearly all of its time without Python's lock. Triton
    before 3.5 can't do this: then nothing happens, and a kernel is compiled when it is first launched. No garbage is
    collected meanwhile.
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
        copy_context().run(compile_in_threads)  # what the mode has set ends with the context
    finally:
        if collects:
            gc.enable()


def _forget_unfinished(launched: list) -> None:
    """Triton before 3.9 keeps the futures of kernels that failed, and would take them for compiled the next time."""
    for jit in launched:
        for kernels, *_ in jit.device_caches.values():
            for key in [key for key, kernel in kernels.items() if hasattr(kernel, "result")]:
                del kernels[key]


def launch(kernel: DependentKernel, grid: tuple[int, ...], device: torch.device, shared: int | None = 100):
    """kernel[grid], dependent if the device can: `launch(kernel, grid, device)(*arguments, **constants)`.

    `shared` is the percentage of a multiprocessor's memory that is to be shared memory, the rest being cache; None
    leaves it to the driver. Kernels overlap only if they agree on it; those of small batches need little.
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
    """jit[grid] for a kernel that is not dependent: it starts when everything before it is complete."""
    if (launched := _launched.get()) is not None:
        launched.append(jit)
    # Triton would parse checks of each sum of integers, for which its parser takes a quarter longer, and drop them
    return partial(jit.run, grid=grid, warmup=launched is not None, sanitize_overflow=False)


@cache
def _prefer_shared_memory(function: int, percentage: int) -> None:
    """Set a kernel's preference, once it is compiled. It is a hint: if it fails, only speed is lost."""
    attribute = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), attribute, percentage)

"""Imports the libraries of an engine faster than plain imports do, so that command-line tools start sooner."""

import atexit
import ctypes
import gc
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from nanovllm.utils.waiting import waiting_for

find_distributions = importlib.metadata.packages_distributions


def import_libraries(settings: Mapping[str, Any]) -> None:
    """Import transformers and PyTorch, while a thread loads PyTorch's native libraries without the GIL.

    If `settings` do not choose a CPU, CUDA is initialized, and forks of this process can't use CUDA. Garbage collection
    skips the imported objects. A missing library raises no error before it is used. After Ctrl-C, the process ends with
    exit status 130, without waiting for the imports.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        with waiting_for("Importing PyTorch"):
            native = _submit(_load_native_libraries, str(settings.get("device")))
            imported = _submit(_import_modules, native)
            wait([native, imported])
    except KeyboardInterrupt:
        atexit.register(os._exit, 130)  # Python could not end while another thread imports
        raise
    finally:
        gc.freeze()
        gc.enable()
    if (error := imported.exception()) is not None and not isinstance(error, ImportError):
        raise error  # now, because importing a broken library again might fail in another way


def _submit(function: Callable, *arguments: Any) -> Future:
    """Call a function in a daemon thread. When Python ends, it does not wait for daemon threads."""
    future: Future = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future


def _load_native_libraries(device: str) -> None:
    """Load PyTorch's native libraries with C functions, which ctypes calls without the GIL.

    A Python import would hold the GIL. The libraries do not acquire the GIL while they are loaded, so they can't
    deadlock with an import in another thread.
    """
    folder = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    ctypes.CDLL(None).dlopen(str(folder / "lib" / "libtorch_python.so").encode(), os.RTLD_NOW)
    if not device.startswith("cpu"):
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before it initializes CUDA
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def _import_modules(native: Future) -> None:
    # transformers asks for the distributions of all packages, but uses few of them
    importlib.metadata.packages_distributions = _DistributionsOfPackages  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = find_distributions
    wait([native])  # otherwise, the import would wait for it while holding the GIL
    import torch  # noqa: F401


class _DistributionsOfPackages(Mapping[str, list[str]]):
    """A lazy `importlib.metadata.packages_distributions()`.

    If a package's name differs from its distribution's name, the metadata of all installed packages is read.
    """

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return find_distributions()

    def __getitem__(self, package: str) -> list[str]:
        with suppress(importlib.metadata.PackageNotFoundError):
            return [importlib.metadata.distribution(package).metadata["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

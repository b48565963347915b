"""The libraries that every engine needs, imported by the commands in less time than imports take by themselves."""

import ctypes
import gc
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

find_distributions = importlib.metadata.packages_distributions


def import_libraries(settings: Mapping[str, Any]) -> None:
    """Import transformers and PyTorch, whose libraries are loaded meanwhile, as that takes no lock of Python.

    CUDA is initialized, too, unless the engine's `settings` say that it runs on a CPU; a fork of this process can't use
    CUDA then. What is imported stays, and no search for garbage goes through it. What is missing is an error where it
    is needed. Ctrl-C interrupts a wait, and no import; the process ends when the import has.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            native = pool.submit(_load_native_libraries, str(settings.get("device")))
            imported = pool.submit(_import_modules, native)
    finally:
        gc.freeze()
        gc.enable()
    if (error := imported.exception()) is not None and not isinstance(error, ImportError):
        raise error  # an import of what is there, and broken, may fail in another way the next time


def _load_native_libraries(device: str) -> None:
    """By functions of C, which are called without Python's lock; imports load libraries with it.

    PyTorch's libraries take no lock of Python while they are loaded: otherwise this and an import could wait for each
    other.
    """
    folder = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    ctypes.CDLL(None).dlopen(str(folder / "lib" / "libtorch_python.so").encode(), os.RTLD_NOW)
    if not device.startswith("cpu"):
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before it initializes CUDA
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def _import_modules(native: Future) -> None:
    # transformers asks for the distributions of all packages, and uses those of few
    importlib.metadata.packages_distributions = _DistributionsOfPackages  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = find_distributions
    wait([native])  # else the import would wait for it, with Python's lock
    import torch  # noqa: F401


class _DistributionsOfPackages(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions()`, which would read the metadata of all that is installed.

    That is done when a package is asked for whose distribution has another name.
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

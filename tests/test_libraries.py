"""The libraries that commands import ahead."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.utils import libraries

PROGRAM = """
import gc, importlib.metadata, sys
from nanovllm.utils.libraries import import_libraries
{before}
import_libraries({{"device": "cpu"}})
assert gc.isenabled() and gc.get_freeze_count() > {frozen}
assert importlib.metadata.packages_distributions.__module__ == "importlib.metadata"
print(sorted({{"torch", "transformers"}} & {{*sys.modules}}))
"""
MISSING = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("before", "frozen", "imported"), [("", 100_000, ["torch", "transformers"]), (MISSING, 0, [])], ids=["all", "none"]
)
def test_libraries_are_imported_if_there_are_any(before, frozen, imported):
    """None of their objects is garbage that is looked for. What is missing is an error later."""
    program = PROGRAM.format(before=before, frozen=frozen)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{imported}\n"


@pytest.mark.parametrize(("device", "has_cuda"), [("cpu", False), ("None", True), ("cuda:1", True)])
def test_native_libraries(monkeypatch, device, has_cuda):
    """CUDA is initialized unless the device is a CPU."""
    calls = []

    def library(name):
        return SimpleNamespace(
            dlopen=lambda path, mode: calls.append(Path(os.fsdecode(path)).name),
            cuInit=lambda flags: calls.append(name),
        )

    monkeypatch.setattr(libraries.ctypes, "CDLL", library)
    libraries._load_native_libraries(device)
    assert calls == ["libtorch_python.so", *["libcuda.so.1"] * has_cuda]


def test_distributions_of_packages(monkeypatch):
    """All are read only for a package whose distribution has another name."""
    expected, reads = importlib.metadata.packages_distributions(), []
    monkeypatch.setattr(libraries, "find_distributions", lambda: reads.append(1) or expected)
    found = libraries._DistributionsOfPackages()
    assert found["numpy"] == expected["numpy"] == found.get("numpy") and not reads
    assert found.get("no_such_package") is None and found["yaml"] == expected["yaml"] == ["PyYAML"]
    assert {*found} == {*expected} and len(found) == len(expected) and reads == [1]

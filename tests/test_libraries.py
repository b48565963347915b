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
import_libraries({"device": "cpu"})
assert gc.isenabled() and gc.get_freeze_count() > 0
assert importlib.metadata.packages_distributions.__module__ == "importlib.metadata"
print(*sorted({"torch", "transformers"} & {*sys.modules}))
"""
TRANSFORMERS = """
import gc, importlib.metadata, sys
assert not gc.isenabled() and "torch" not in sys.modules
assert importlib.metadata.packages_distributions.__module__ == "nanovllm.utils.libraries"
assert importlib.metadata.packages_distributions().get("no_such_package") is None
"""
MISSING = "raise ImportError"


@pytest.mark.parametrize(
    ("transformers", "torch", "imported"),
    [(TRANSFORMERS, "", "torch transformers"), (TRANSFORMERS, MISSING, "transformers"), (MISSING, "", "")],
    ids=["all", "no torch", "no transformers"],
)
def test_libraries_are_imported_if_there_are_any(tmp_path, transformers, torch, imported):
    """One after the other. None of their objects is garbage that is looked for. What is missing is an error later."""
    for name, source in ("transformers", transformers), ("torch", torch):
        (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), str(Path(libraries.__file__).parents[2])])
    command, env = [sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
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

"""Counts the kernels of each family's decoder layer in a decode step, after fusing. Needs Triton, but no GPU.

The step computes two sequences. Kernels of this package run in Triton's interpreter, and each PyTorch operation that is
not a view counts as one kernel. Arguments: cases of test_models.py or test_hybrid.py; by default, all families.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/scripts", "")]

from test_fused import FAMILIES, MODULES, STEPS, Runner, make_folder
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from nanovllm.fused import fuse
from nanovllm.kernels import ops, register_ops

OTHER_FAMILIES = ["llama", "qwen2", "seed-oss", "phi3", "granite", "ministral3", "olmo3"]
VIEWS = "view _unsafe_view view_as t transpose permute slice select unsqueeze squeeze expand as_strided split unbind "
VIEWS += "alias split_with_sizes tensor_split chunk flatten unflatten reshape _reshape_alias detach lift_fresh "
VIEWS += "resolve_conj resolve_neg empty empty_like new_empty empty_strided"


class Counts(TorchDispatchMode):
    """Counts PyTorch's operations and Triton's launches by name, except operations within a launch."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_launching = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not self.is_launching and name not in VIEWS.split():
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    def launch(self, run):
        def count(executor, *args, **options):
            self.counts[executor.fn.__name__] += not self.is_launching
            self.is_launching = True
            try:
                return run(executor, *args, **options)
            finally:
                self.is_launching = False

        return count


def kernels_of_step(runner: Runner) -> Counter[str]:
    for rows in STEPS[:2]:
        runner.step(rows, runner.model)
    counts, run = Counts(), GridExecutor.__call__
    GridExecutor.__call__ = counts.launch(run)
    try:
        with counts:
            runner.step(STEPS[2], runner.model)
    finally:
        GridExecutor.__call__ = run
    return counts.counts


def kernels_per_layer(name: str) -> dict[str, float]:
    """Compare the whole model with its first layer alone."""
    with TemporaryDirectory() as folder:
        runner = Runner(make_folder(Path(folder) / name, name), "triton")
        fuse(runner.model)
        decoder = getattr(runner.model.model, "language_model", runner.model.model)
        layers = decoder.layers
        whole = kernels_of_step(runner)
        decoder.layers = layers[:1]
        first = kernels_of_step(runner)
        return {kernel: (n - first[kernel]) / (len(layers) - 1) for kernel, n in whole.items() if n != first[kernel]}


if __name__ == "__main__":
    register_ops("cpu", vars(ops))
    known = [name for name in FAMILIES + OTHER_FAMILIES if name in MODULES and name != "llama-gelu"]
    for name in sys.argv[1:] or known:
        counts = kernels_per_layer(name)
        print(
            f"{name}: {sum(counts.values()):.0f}", *(f"{kernel} {n:.3g}" for kernel, n in counts.items()), sep="\n    "
        )

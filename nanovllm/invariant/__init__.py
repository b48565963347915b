"""Implements the setting `batch_invariant`: no bit of a request's answer depends on what else the engine computes.

If the number of rows of a matmul changes, a library may choose another algorithm, which rounds each row differently. If
`batch_invariant` is set, each operation always computes a row in the same way: in a batch or alone, in a chunk or in a
decode step.

`cpu.py` and `cuda.py` contain the runners. A runner selects the variant of the operations (`cpu_ops.py` or
`cuda_ops.py`) and the attention backend. The docstrings of the CUDA kernels explain why results do not depend on the
batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanovllm.kernels import variant

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

VARIANT = "-invariant"  # the variant of the operations: see kernels/__init__.py


@contextmanager
def invariant_operations() -> Iterator[None]:
    """Let the current thread use the batch-invariant operations during a `with` block."""
    token = variant.set(VARIANT)
    try:
        yield
    finally:
        variant.reset(token)


def refuse_states(runner: "ModelRunner", *known: type) -> None:
    """Raise ValueError if a layer with a recurrent state has a type that is not in `known`.

    The state of a layer of unknown type might depend on how prompts are divided into chunks. The model of `runner` must
    be loaded.
    """
    layers = (layer for spec, layers in runner.cache_groups.items() if spec.of_states for layer in layers)
    for layer in layers:
        if not isinstance(layer, known):
            raise ValueError(
                f"batch_invariant=True on {runner.device.type}: must be False for a model with layers of "
                f"{type(layer).__name__}, which keep a state"
            )

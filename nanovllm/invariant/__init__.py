"""The setting `batch_invariant`: no bit of a request's answer depends on what else the engine computes.

A library may compute a row of a matmul differently if there are more or fewer rows, and then rounds it differently.
Here each operation computes a row in the same way everywhere: in a batch or alone, in a chunk or in a decode step.

`cpu.py` and `cuda.py` have the runners that `engine/runners.py` chooses by the type of the device. A runner sets the
variant of the operations (`cpu_ops.py`, `cuda_ops.py`) and the attention backend. `kernels/invariant_gemm.py`,
`kernels/invariant_attention.py` and `delta_net/kernels/delta_net_tokens.py` explain why the kernels of CUDA do not
depend on the batch.
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
    """Let this thread use the operations of this variant in a `with` block."""
    token = variant.set(VARIANT)
    try:
        yield
    finally:
        variant.reset(token)


def refuse_states(runner: "ModelRunner", *known: type) -> None:
    """ValueError if a layer has a state and is not of a `known` type: its state may depend on the chunks of a prompt.

    `runner` is a ModelRunner whose model is loaded.
    """
    layers = (layer for spec, layers in runner.cache_groups.items() if spec.of_states for layer in layers)
    for layer in layers:
        if not isinstance(layer, known):
            raise ValueError(
                f"batch_invariant=True on {runner.device.type}: must be False for a model with layers of "
                f"{type(layer).__name__}, which keep a state"
            )

"""An operation is a function that is defined in plain PyTorch, next to code that calls it.

On CUDA, the Triton kernels listed in `ops.py` replace the definitions. On a CPU, functions in `layers/cpu_ops.py`
replace a few. `register_ops` adds a table of replacements for another device.
"""

import importlib.util
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

HOMES = {"cpu": "nanovllm.layers.cpu_ops", "cuda": "nanovllm.kernels.ops"}
_tables: dict[str, Mapping[str, Callable]] = {}  # key: the device type, followed by the variant
# the variant of the operations that this thread uses: "", or "-invariant" (see invariant/)
variant: ContextVar[str] = ContextVar("variant of the operations", default="")
_forget: list[Callable[[], None]] = []  # each clears the cached choices of one operation


def ops_for(device: torch.device) -> Mapping[str, Callable]:
    """Return the replacements of operations on `device`, by operation name."""
    if (kind := device.type + variant.get()) not in _tables:
        home = HOMES.get(kind) if kind != "cuda" or importlib.util.find_spec("triton") else None
        _tables[kind] = vars(importlib.import_module(home)) if home else {}
    return _tables[kind]


def register_ops(device_type: str, table: Mapping[str, Callable]) -> None:
    """Register `table` for a device type ("cuda") or for a variant of a device type ("cuda-invariant").

    A function in `table` replaces the operation with the same name, and takes the same arguments. If the function
    returns `NotImplemented`, the operation's definition runs instead.
    """
    _tables[device_type] = table
    for forget in _forget:
        forget()


def operation(definition: Callable[P, R]) -> Callable[P, R]:
    """Decorate the definition of an operation. The device of the first argument determines which replacement runs."""

    @cache  # a small model on a CPU calls 50 operations per token
    def choose(device: torch.device, variant: str) -> Callable:
        if (own := ops_for(device).get(definition.__name__)) is None:
            return definition

        def compute_or_define(*args, **options):
            result = own(*args, **options)
            return definition(*args, **options) if result is NotImplemented else result

        return compute_or_define

    @wraps(definition)
    def compute(x, *args, **options):
        return choose(x.device, variant.get())(x, *args, **options)

    _forget.append(choose.cache_clear)
    return compute

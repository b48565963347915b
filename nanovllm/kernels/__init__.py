"""Operations: functions that plain PyTorch defines, and that a device may compute in its own way.

The definitions stand where they are used, mostly in `layers/`, and are what a CPU computes. `ops.py` is the table of
CUDA, which computes them by Triton kernels; `register_ops` adds that of another device.
"""

import importlib.util
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_tables: dict[str, Mapping[str, Callable]] = {}  # by the type of the device, and the variant
# which operations the steps of this thread use, beside those of the device: "", or "-invariant" (see invariant/)
variant: ContextVar[str] = ContextVar("variant of the operations", default="")
_forget: list[Callable[[], None]] = []  # each clears an operation's cached choice of who computes it


def ops_for(device: torch.device) -> Mapping[str, Callable]:
    """The operations that a device computes in its own way, by name; a CPU has none, unless a variant is set."""
    if (kind := device.type + variant.get()) not in _tables:
        has_kernels = kind == "cuda" and importlib.util.find_spec("triton") is not None
        _tables[kind] = vars(importlib.import_module("nanovllm.kernels.ops")) if has_kernels else {}
    return _tables[kind]


def register_ops(device_type: str, table: Mapping[str, Callable]) -> None:
    """Let all devices of a type, or of a type and a variant, compute the operations that `table` has by their names.

    A function takes and returns what the definition does. What it returns NotImplemented for, the definition computes.
    """
    _tables[device_type] = table
    for forget in _forget:
        forget()


def operation(definition: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the device of the first argument computes the operation in its own way, or as it is defined."""

    @cache  # a small model on a CPU computes 50 operations for a token
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

"""Modules that get another `forward` after they were constructed, as quantized and fused ones do."""

from functools import cache

from torch import nn


def replace_methods(module: nn.Module, form: type, prefix: str) -> None:
    """Put the methods of `form` before those of the module's class: isinstance, names and parameters stay.

    The class becomes a subclass of both, whose name begins with `prefix`, as PyTorch's `fully_shard` does it.
    """
    module.__class__ = _subclass(form, type(module), prefix)


@cache
def _subclass(form: type, base: type, prefix: str) -> type:
    return type(prefix + base.__name__, (form, base), {})

"""Replaces methods of existing objects, so that features and fused forms can change modules and schedulers."""

from functools import cache
from typing import Any


def replace_methods(module: Any, form: type, prefix: str) -> None:
    """Override methods of an object with the methods of `form`.

    The object's parameters and their names do not change, and the object is also an instance of its old class. As in
    PyTorch's `fully_shard`, the new class is a subclass of both `form` and the old class. The new class's name begins
    with `prefix`.
    """
    module.__class__ = subclass(form, type(module), prefix)


@cache
def subclass(form: type, base: Any, prefix: str) -> Any:
    """Return a subclass of `form` and of the class `base`. The methods of `form` take precedence."""
    return type(prefix + base.__name__, (form, base), {})

"""Checks of arguments: each error states the name, the value and the bound. An optional value may be None.

Numbers are returned as Python's own types, as arithmetic with a fixed-width NumPy integer could overflow later.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal, overload


@overload
def check_int(name: str, value: Any, low: int, high: int | None = None, optional: Literal[False] = False) -> int: ...
@overload
def check_int(name: str, value: Any, low: int, high: int | None = None, *, optional: bool) -> int | None: ...


def check_int(name: str, value: Any, low: int, high: int | None = None, optional: bool = False) -> int | None:
    """`value` as an int. TypeError for anything else, bools included; ValueError unless it is in `low` to `high`."""
    if optional and value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an integer")
    return _check_range(name, int(value), low, high)


def check_real(name: str, value: Any, low: float, high: float = 1e9) -> float:
    """`value` as a float. TypeError if it is not a number; ValueError unless it is finite and in `low` to `high`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r}: must be finite")
    return _check_range(name, number, low, high)


def check_bool(name: str, value: Any, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        raise TypeError(f"{name}={value!r}: must be True or False")


def check_choice(name: str, value: Any, choices: Iterable) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _check_range(name, value, low, high):
    if value < low:
        raise ValueError(f"{name}={value!r}: must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value!r}: must be at most {high}")
    return value

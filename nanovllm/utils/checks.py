"""Checks of what a caller passes in: each error names the value and the bound. What is optional may be None.

Numbers are returned as Python's own, so that a NumPy integer of fixed width is converted once and never wraps later.
"""

import math
from numbers import Integral, Real


def check_int(name: str, value, low: int, high: int | None = None, optional: bool = False) -> int | None:
    """`value` as an int. Raises TypeError if it is no integer (a bool is none), ValueError out of `low` to `high`."""
    if optional and value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an integer")
    return _check_range(name, int(value), low, high)


def check_real(name: str, value, low: float, high: float = 1e9) -> float:
    """`value` as a float. Raises TypeError if it is no number, ValueError if it is not finite or out of its range."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r}: must be finite")
    return _check_range(name, number, low, high)


def check_bool(name: str, value, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        raise TypeError(f"{name}={value!r}: must be True or False")


def check_choice(name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _check_range(name, value, low, high):
    if value < low:
        raise ValueError(f"{name}={value!r}: must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value!r}: must be at most {high}")
    return value

"""Checks of what a caller passes in: each error names the value and the bound. What is optional may be None."""
import math
from numbers import Integral, Real


def check_int(name: str, value, low: int, high: int | None = None, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an integer")
    _check_range(name, value, low, high)


def check_real(name: str, value, low: float, high: float = 1e9) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a number")
    if value != value or value in (math.inf, -math.inf):
        raise ValueError(f"{name}={value!r}: must be finite")
    _check_range(name, value, low, high)


def check_bool(name: str, value, optional: bool = False) -> None:
    if not (isinstance(value, bool) or optional and value is None):
        raise TypeError(f"{name}={value!r}: must be True or False")


def check_choice(name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _check_range(name, value, low, high):
    if value < low:
        raise ValueError(f"{name}={value!r}: must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value!r}: must be at most {high}")

"""Checks arguments and files. An error states the argument's name, its value and the bound.

Numbers are converted to Python types, because arithmetic on fixed-width NumPy integers could overflow later.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from nanovllm.utils.download import broken_file


def checked(default: Any, check: Callable | str, **bounds: Any) -> Any:
    """Make a dataclass field.

    `check_fields` calls `check(name, value, **bounds)` if the field's value is not `default`. For a rarely needed
    check, `check` is the string "module:name", and the check is imported when it is called.
    """
    return field(default=default, metadata={"check": check, "bounds": bounds})


def check_fields(params: Any) -> None:
    """Replace the values of `checked` fields with the results of their checks."""
    for each in fields(params):
        if each.metadata and (value := getattr(params, each.name)) is not each.default:
            check = resolve_name(home) if isinstance(home := each.metadata["check"], str) else home
            object.__setattr__(params, each.name, check(each.name, value, **each.metadata["bounds"]))


C = TypeVar("C", bound=type)


def checks_names(cls: C) -> C:
    """Decorate a dataclass, so that the TypeError for an unknown parameter suggests a known name."""
    init = cls.__init__

    @wraps(init)
    def __init__(self, *values, **named):
        for name in named.keys() - cls.__dataclass_fields__.keys():
            raise unknown_name("parameter", name, cls.__dataclass_fields__)
        init(self, *values, **named)

    cls.__init__ = __init__
    return cls


def unknown_name(kind: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for a name that is not in `known`."""
    return TypeError(f"unknown {kind} {name!r}{hint(name, known)}: must be one of {', '.join(known)}")


def hint(name: Any, known: Iterable) -> str:
    """Return " (did you mean ...?)" with the most similar known name. If no name is similar to `name`, return ""."""
    close = get_close_matches(str(name), [x for x in known if isinstance(x, str)], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int. Raises TypeError if it is no integer, and ValueError if it is out of bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: must be an integer")
    return _check_range(name, int(value), low, high)


def check_real(name: str, value: Any, low: float, high: float = 1e9) -> float:
    """Return `value` as a finite float. Raises TypeError if it is no number, and ValueError if it is out of bounds."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r:.80}: must be finite")
    return _check_range(name, number, low, high)


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: must be True or False")
    return value


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError if `text` contains a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is a lone surrogate, which is not a character"
        raise ValueError(f"{name}={text!r:.80}: {problem}") from None


def check_choice(name: str, value: Any, choices: Iterable) -> Any:
    if all(value != choice for choice in choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r:.80}: must be one of {known}{hint(value, choices)}")
    return value


def check_object(name: str, value: Any) -> None:
    """Raise TypeError if a value of config.json is not an object."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}={value!r:.80}: must be an object")


def _check_range(name, value, low, high):
    if value < low:
        raise ValueError(f"{name}={value!r:.80}: must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value!r:.80}: must be at most {high}")
    return value


def parse_json(name: str, value: Any) -> Any:
    """Parse a string as JSON, and return any other value unchanged. Raises ValueError if the string is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name}={value!r:.80}: is not JSON ({error})") from None


def read_json(file: Path) -> dict:
    """Read the JSON object in `file`. If the content is invalid, raises a ValueError that names the file."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # the syntax or the encoding is wrong, or values are nested too deep
        raise broken_file(file, f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(content).__name__}")
    return content

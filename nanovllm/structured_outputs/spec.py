"""Checks `SamplingParams.structured_outputs` without a model and without llguidance."""

import json
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2**16  # of a schema, expression, grammar or choices; this bounds the compile time in most cases


def check_spec(value: Any, ignore_eos: bool) -> dict[str, Any]:
    """Check a `structured_outputs` value, and return it in a uniform form.

    JSON schemas become texts, and choices become tuples. Raises ValueError or TypeError.
    """
    if not isinstance(value, dict):
        raise TypeError(f"structured_outputs={value!r:.80}: must be a dict")
    if len(value) != 1 or not CHECKS.keys() >= value.keys():
        raise ValueError(f"structured_outputs: has the keys {[*value]!r:.80}; must have one of {', '.join(CHECKS)}")
    if ignore_eos:
        raise ValueError("ignore_eos=True: must be False with structured_outputs, which end at an end-of-sequence id")
    ((kind, content),) = value.items()
    content = CHECKS[kind](f"structured_outputs[{kind!r}]", content)
    try:
        num_bytes = sum(len(text.encode()) for text in (content if kind == "choice" else [str(content)]))
    except UnicodeEncodeError:
        raise ValueError(f"structured_outputs[{kind!r}]: has half of a surrogate pair, which is no character") from None
    if num_bytes > MAX_BYTES:
        raise ValueError(f"structured_outputs[{kind!r}]: has {num_bytes} bytes; must be at most {MAX_BYTES}")
    return {kind: content}


def _schema(name: str, value: Any) -> str:
    """Return a JSON schema as text. The properties keep their order, because answers follow this order."""
    if not isinstance(value, (str, dict)):
        raise TypeError(f"{name}={value!r:.80}: must be a JSON schema, as a dict or as text")
    try:
        schema = json.loads(value, parse_constant=_refuse_constant) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name}={value!r:.80}: is not JSON ({error})") from error
    if not isinstance(schema, dict):
        raise ValueError(f"{name}={value!r:.80}: must be a JSON schema that is an object")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r:.80}: must be a string")
    return value


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(choice, str) for choice in value):
        raise TypeError(f"{name}={value!r:.80}: must be a list of strings")
    if not value:
        raise ValueError(f"{name}={value!r}: must have at least 1 choice")
    return tuple(value)


def _true(name: str, value: Any) -> bool:
    if value is not True:
        raise ValueError(f"{name}={value!r:.80}: must be True")
    return True


# each function returns the checked content, or raises an error whose message begins with the given name
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "json": _schema,
    "json_object": _true,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}

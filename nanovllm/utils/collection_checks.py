"""Checks sampling parameters that contain several values."""

from collections.abc import Callable, Container
from functools import partial
from numbers import Integral
from typing import Any

from nanovllm.utils.checks import check_int, check_real, check_unicode


def check_collections(params: Any, names: Container[str]) -> None:
    """Check those parameters of a SamplingParams that are in `names`, and replace their values with the results."""
    for name, check in CHECKS.items():
        if name in names:
            object.__setattr__(params, name, check(name, getattr(params, name)))
    if any(not word.strip() for word in params.bad_words or ()):
        raise ValueError(f"bad_words={params.bad_words!r:.80}: a bad word must have a character that is not a space")
    if params.stop and not params.detokenize:
        raise ValueError(f"detokenize=False: must be True with stop={params.stop!r:.80}, which is found in the text")
    if params.structured_outputs is not None:
        from nanovllm.structured_outputs.spec import check_spec  # few requests have them

        object.__setattr__(params, "structured_outputs", check_spec(params.structured_outputs, params.ignore_eos))


def check_strings(name: str, value: Any) -> tuple[str, ...]:
    """Return strings as a tuple.

    Raises TypeError if a value is not a string, and ValueError if a string is empty or has a lone surrogate.
    """
    strings = _tuple_of(str, name, value)
    for string in strings:
        if not string:
            raise ValueError(f"{name}={strings!r:.80}: a string must have at least 1 character")
        check_unicode(name, string)
    return strings


def check_ids(name: str, value: Any, min_length: int = 0, max_length: int | None = None) -> tuple[int, ...]:
    """Return token ids as a tuple. The ids are not compared with the size of the vocabulary."""
    ids = _tuple_of(Integral, name, value)
    check_int(f"{name}: the number of ids", len(ids), min_length, max_length)
    return tuple([check_int(f"{name}: token id", token_id, 0) for token_id in ids])


def check_biases(name: str, value: Any) -> dict[int, float] | None:
    """Return a dict that maps token ids to biases, or None if there are no biases."""
    if not isinstance(biases := {} if value is None else value, dict):
        raise TypeError(f"{name}={biases!r:.80}: must map token ids to numbers")
    values = [check_real(f"{name}[{token_id!r}]", bias, -100, 100) for token_id, bias in biases.items()]
    return dict(zip(check_ids(name, [*biases], max_length=300), values)) or None


def _tuple_of(kind: type, name: str, value: Any) -> tuple:
    """Return a tuple of values. Raises TypeError if a value does not have the type `kind`."""
    value = value.tolist() if hasattr(value, "tolist") else value  # a NumPy array or a tensor
    values = () if value is None else (value,) if isinstance(value, kind) else value
    if not isinstance(values, (list, tuple, set, frozenset, range)) or not all(isinstance(v, kind) for v in values):
        what = "a string" if kind is str else "an integer"
        raise TypeError(f"{name}={value!r:.80}: must be {what}, or a list of those")
    return tuple(values)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "stop": check_strings,
    "stop_token_ids": partial(check_ids, max_length=128),
    "bad_words": check_strings,
    "allowed_token_ids": partial(check_ids, min_length=1),
    "logit_bias": check_biases,
}

"""The shapes in which prompts may come."""
from collections.abc import Iterator
from numbers import Integral

Prompt = str | list[int]


def as_list(value) -> list | None:
    """A list of what is a list, a tuple, an iterator, an array or a tensor; None of anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, Iterator)) else None


def as_prompts(prompts) -> list[Prompt]:
    """A list of prompts, of what may be a single one: a string, or a flat list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if (items := as_list(prompts)) is None:
        raise TypeError(f"prompts={prompts!r:.80}: must be a string, a list of token ids, or a list of those")
    return [items] if items and all(issubclass(kind, Integral) for kind in set(map(type, items))) else items

"""The forms that a prompt may have."""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TypedDict, TypeGuard

Message = Mapping[str, object]  # of a conversation: "role", "content", and other keys that its chat template reads


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # its text, if the caller has that too


Prompt = str | list[int] | TextPrompt | TokensPrompt | list[Message]
KINDS = "a string, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', or a conversation"


def as_list(value) -> list | None:
    """The items of a list, a tuple, an iterator, an array or a tensor; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, Iterator)) else None


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    """Whether `value` is a list of messages."""
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, Mapping) and "role" in x for x in value)
    )


def as_prompts(prompts) -> list:
    """A list of prompts, also if `prompts` is a single one."""
    if isinstance(prompts, (str, Mapping)) or is_conversation(prompts):
        return [prompts]
    if (items := as_list(prompts)) is None:
        raise TypeError(f"prompts={prompts!r:.80}: must be {KINDS}, or a list of those")
    return [items] if items and all(issubclass(kind, Integral) for kind in set(map(type, items))) else items

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


def render_chat(tokenizer, messages: list[Message], template_arguments: Mapping) -> str:
    """The text that the chat template makes of a conversation; ValueError if it fails, or if a content is not text."""
    if not is_conversation(messages):
        raise ValueError(
            f"messages={messages!r:.80}: must be a list of dicts with 'role' and 'content', or a list of those"
        )
    plain = [{**message, "content": _as_text(message.get("content"))} for message in messages]
    try:
        arguments = {"add_generation_prompt": True} | dict(template_arguments) | {"tokenize": False}
        return tokenizer.apply_chat_template(plain, **arguments)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"messages={messages!r:.80}: the chat template fails ({error})") from error


def _as_text(content):
    """The text of a content that is a list of parts; any other content as it is."""
    if not isinstance(content, (list, tuple)):
        return content
    texts: list = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content
    ]
    for part, text in zip(content, texts):
        if not isinstance(text, str):
            raise ValueError(f"messages: content part {part!r:.80}: must be text, as {{'type': 'text', 'text': ...}}")
    return "\n".join(texts)

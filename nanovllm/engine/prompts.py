"""The shapes in which prompts may come."""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TypedDict

Message = Mapping[str, object]  # of a conversation: "role", "content", and what else its template reads


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # the same as text, if the caller has it


Prompt = str | list[int] | TextPrompt | TokensPrompt | list[Message]
KINDS = "a string, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', or a conversation"


def as_list(value) -> list | None:
    """A list of what is a list, a tuple, an iterator, an array or a tensor; None of anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, Iterator)) else None


def is_conversation(value) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, Mapping) and "role" in x for x in value)
    )


def as_prompts(prompts) -> list[Prompt]:
    """A list of prompts, of what may be a single one."""
    if isinstance(prompts, (str, Mapping)) or is_conversation(prompts):
        return [prompts]
    if (items := as_list(prompts)) is None:
        raise TypeError(f"prompts={prompts!r:.80}: must be {KINDS}, or a list of those")
    return [items] if items and all(issubclass(kind, Integral) for kind in set(map(type, items))) else items


def render_chat(tokenizer, messages: list[Message], template_arguments: Mapping) -> str:
    """The text of a conversation, by its template; ValueError where it refuses it. Parts of a content must be text."""
    if not is_conversation(messages):
        raise ValueError(
            f"messages={messages!r:.80}: must be a list of dicts with 'role' and 'content', or a list of those"
        )
    plain = [{**message, "content": _as_text(message.get("content"))} for message in messages]
    try:
        arguments = {"add_generation_prompt": True} | dict(template_arguments) | {"tokenize": False}
        return tokenizer.apply_chat_template(plain, **arguments)
    except Exception as error:  # whatever a template may raise
        raise ValueError(f"messages={messages!r:.80}: the chat template refuses them ({error})") from error


def _as_text(content):
    """The text of a content that is given in parts; another content as it is."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content]
    for part, text in zip(content, texts):
        if not isinstance(text, str):
            raise ValueError(f"content part {part!r:.80}: must be text, as {{'type': 'text', 'text': ...}}")
    return "\n".join(texts)

"""Conversations as prompts: their form, and the text that a chat template makes of them."""

from collections.abc import Mapping

from nanovllm.engine.prompts import Message, is_conversation


def as_conversations(messages) -> list[list[Message]]:
    """A list of conversations, also if `messages` is a single one; ValueError for anything else."""
    conversations = [messages] if is_conversation(messages) else messages
    if not isinstance(conversations, (list, tuple)) or not all(map(is_conversation, conversations)):
        raise _not_a_conversation(messages)
    return [*conversations]


def render_chat(tokenizer, messages: list[Message], template_arguments: Mapping) -> str:
    """The text that the chat template makes of a conversation; ValueError if it fails, or if a content is not text."""
    if not is_conversation(messages):
        raise _not_a_conversation(messages)
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


def _not_a_conversation(messages) -> ValueError:
    return ValueError(
        f"messages={messages!r:.80}: must be a list of dicts with 'role' and 'content', or a list of those"
    )

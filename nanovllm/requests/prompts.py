"""Reads prompts that are neither strings nor lists of token ids: dicts, conversations, arrays and iterators."""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

from nanovllm.requests.content_parts import is_image
from nanovllm.requests.request import Message, Prompt

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor

PROMPT_KEYS = {"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs"}
KINDS = "a string, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', or a conversation"


def as_prompts(prompts) -> list:
    """Return a list of prompts. A single prompt becomes a list."""
    if isinstance(prompts, (str, Mapping)) or is_conversation(prompts):
        return [prompts]
    if (items := as_list(prompts)) is None:
        raise TypeError(f"prompts={prompts!r:.80}: must be {KINDS}, or a list of those")
    return [items] if items and all(issubclass(kind, Integral) for kind in set(map(type, items))) else items


def as_priorities(priority: Any, num_prompts: int) -> list:
    """Return the unchecked priority of each prompt. If `priority` is None, all priorities are 0."""
    if priority is None:
        return [0] * num_prompts
    if (priorities := as_list(priority)) is None:
        raise TypeError(f"priority={priority!r:.80}: must be a list with one integer for each prompt, or None")
    if len(priorities) != num_prompts:
        raise ValueError(f"priority: has {len(priorities)} integers for {num_prompts} prompts: pass one for each")
    return priorities


def as_conversations(messages) -> list[list[Message]]:
    """Return a list of conversations. A single conversation becomes a list. Raises ValueError for any other value."""
    conversations = [messages] if is_conversation(messages) else messages
    if not isinstance(conversations, (list, tuple)) or not all(map(is_conversation, conversations)):
        raise _not_a_conversation(messages)
    return [*conversations]


def check_template_arguments(arguments: Mapping | None) -> dict:
    """Return the `chat_template_kwargs` of a call as a dict.

    Raises TypeError if `arguments` is neither a mapping nor None.
    """
    if not isinstance(arguments, Mapping | None):
        raise TypeError(f"chat_template_kwargs={arguments!r:.80}: must be a dict")
    return dict(arguments or {})


def as_list(value) -> list | None:
    """Return the items of a list, tuple, iterator, array or tensor as a list. For any other value, return None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, Iterator)) else None


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, Mapping) and "role" in x for x in value)
    )


def has_images(prompt: Any) -> bool:
    if isinstance(prompt, Mapping):
        data = prompt.get("multi_modal_data")
        return not (data is None or (isinstance(data, Mapping) and not data))
    contents = (message.get("content") for message in prompt) if is_conversation(prompt) else ()
    return any(is_image(part) for x in contents if isinstance(x, (list, tuple)) for part in x)


def read_text_prompt(
    prompt: Prompt,
    template_arguments: Mapping,
    processor: "InputProcessor",
    add_special_tokens: bool = True,
    is_cut: bool = False,
) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None if unknown) and the token ids.

    If the prompt is a text, `add_special_tokens` and `is_cut` are passed to `encode`.
    """
    if is_conversation(prompt):
        with processor.tokenizer_lock:
            chat = render_chat(processor.tokenizer, prompt, template_arguments)
        return chat, processor.encode(chat, add_special_tokens=False, is_cut=is_cut)
    if isinstance(prompt, str):
        return prompt, processor.encode(prompt, add_special_tokens, is_cut)
    text: Any = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        is_known = prompt.keys() <= PROMPT_KEYS and not isinstance(ids, str)
        if not isinstance(text, str | None) or (text is None and ids is None) or not is_known:
            raise TypeError(
                f"prompt={prompt!r:.80}: a dict must have 'prompt' (text) or 'prompt_token_ids', and no keys but"
                f" {sorted(PROMPT_KEYS)}"
            )
        if ids is None and text is not None:
            return text, processor.encode(text, add_special_tokens, is_cut)
    ids = as_list(ids)
    if ids is None or any(kind is bool or not issubclass(kind, Integral) for kind in set(map(type, ids))):
        raise TypeError(f"prompt={prompt!r:.80}: must be {KINDS}")
    return text, [int(i) for i in ids]


def render_chat(tokenizer, messages: list[Message], template_arguments: Mapping) -> str:
    """Render a conversation with the chat template.

    Raises ValueError if the template fails or if content is not text.
    """
    if not is_conversation(messages):
        raise _not_a_conversation(messages)
    arguments = {"add_generation_prompt": True} | dict(template_arguments) | {"tokenize": False}
    try:
        template = tokenizer.get_chat_template(arguments.get("chat_template"), tools=arguments.get("tools"))
        from nanovllm.requests.chat_templates import forms_of  # jinja2 takes a tenth of a second to import

        forms = forms_of(template)
    except Exception as error:  # the tokenizer has no template, or no template of this name
        raise _template_fails(messages, error) from error
    if arguments.get("chat_template") is None:  # the caller's own template may take any role
        forms.check_roles(messages)
    converted, arguments = forms.messages(messages), forms.arguments(arguments)
    try:
        return tokenizer.apply_chat_template(converted, **arguments)
    except Exception as error:  # a template may raise anything
        if (with_contents := forms.with_contents(converted)) == converted:
            raise _template_fails(messages, error) from error
    try:
        return tokenizer.apply_chat_template(with_contents, **arguments)
    except Exception as error:
        raise _template_fails(messages, error) from error


def _template_fails(messages, error: Exception) -> ValueError:
    return ValueError(f"messages={messages!r:.80}: the chat template fails ({error})")


def _not_a_conversation(messages) -> ValueError:
    return ValueError(
        f"messages={messages!r:.80}: must be a list of dicts with 'role' and 'content', or a list of those"
    )

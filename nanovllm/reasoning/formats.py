"""How models mark their reasoning. The names are those of vLLM's reasoning parsers; several name the same format."""

from collections.abc import Mapping
from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """The reasoning stands between two markers, before the answer.

    is_open: an answer begins inside the reasoning, unless its prompt has ended that, so that the answer has only the
        end marker. Otherwise it does so where the prompt has opened the reasoning.
    """

    begin: str
    end: str
    is_open: bool = False


THINK = ReasoningFormat("<think>", "</think>")
FORMATS = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "deepseek_r1": THINK._replace(is_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
# words of a template that can switch reasoning on
HINTS = "reasoning_content", "enable_thinking", "thinking", "reasoning_effort"


def template_text(chat_template: str | Mapping[str, str] | None) -> str:
    """The text of a chat template, or of several that have names."""
    return "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""


def format_of(chat_template: str) -> str | None:
    """The name of the format that a chat template shows; None if it shows none that is known."""
    if "[THINK]" in chat_template:
        return "mistral"
    if "<think>" in chat_template:
        return "think"
    if "</think>" in chat_template:  # it only removes the reasoning of earlier answers
        return "deepseek_r1" if DEEPSEEK_TURN in chat_template else "think"
    return None


def has_unknown_reasoning(chat_template: str) -> bool:
    """Whether a chat template speaks of reasoning, in a format that is not known."""
    return format_of(chat_template) is None and any(hint in chat_template for hint in HINTS)

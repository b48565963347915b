"""Defines the formats in which models mark their reasoning. The names of the formats are those of vLLM's parsers."""

from collections.abc import Mapping
from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """Describes the two markers that enclose the reasoning before an answer.

    is_open: whether, by default, the model starts inside the reasoning and writes no begin marker. If the prompt
        contains a marker, the marker overrides `is_open`.
    inner: special tokens that may follow the begin marker in a prompt, and do not begin a turn.
    """

    begin: str
    end: str
    is_open: bool = False
    inner: tuple[str, ...] = ()


THINK = ReasoningFormat("<think>", "</think>")
# `end` leads from a thought to the answer
HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", is_open=True
)
SEED = ReasoningFormat("<seed:think>", "</seed:think>", inner=("<seed:cot_budget_reflect>",))
FORMATS = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "deepseek_r1": THINK._replace(is_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": SEED,
    "openai_gptoss": HARMONY,
}
DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
# words that suggest that a chat template can switch reasoning on
HINTS = "reasoning_content", "enable_thinking", "thinking", "reasoning_effort"


def template_text(chat_template: str | Mapping[str, str] | None) -> str:
    """Return the text of a chat template. If there are several named templates, join the texts of all templates."""
    return "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""


def format_of(chat_template: str) -> str | None:
    """Return the name of the reasoning format that a chat template uses, or None if no known format is found."""
    if HARMONY.begin in chat_template:
        return "openai_gptoss"
    if "[THINK]" in chat_template:
        return "mistral"
    if SEED.begin in chat_template:
        return "seed_oss"
    if "<think>" in chat_template:
        return "think"
    if "</think>" in chat_template:  # the template only removes the reasoning of earlier answers
        return "deepseek_r1" if DEEPSEEK_TURN in chat_template else "think"
    return None


def has_unknown_reasoning(chat_template: str) -> bool:
    """Return whether a chat template mentions reasoning but uses no known format."""
    return format_of(chat_template) is None and any(hint in chat_template for hint in HINTS)

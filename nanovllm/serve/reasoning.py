"""What a model thinks before it answers: the text between `<think>` and `</think>`, found while it arrives."""

from nanovllm.serve.tool_parsers import length_before

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Splits one answer into reasoning and the rest. Qwen3, DeepSeek-R1 and others write it so, at the beginning."""

    def __init__(self, is_inside: bool):
        """is_inside: the prompt ends with `<think>`, as some chat templates have it."""
        self._held = ""
        self._state = "inside" if is_inside else "before"  # then "space" and "after"

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Reasoning and other text that are complete; what may be part of a tag is held back until the end."""
        self._held += text
        if self._state == "before":
            begun = self._held.lstrip()
            if BEGIN.startswith(begun) and begun != BEGIN and not is_last:
                return "", ""
            if begun.startswith(BEGIN):
                self._state, self._held = "inside", begun[len(BEGIN) :]
            else:
                self._state = "after"
        reasoning = ""
        if self._state == "inside":
            end = length_before(END, self._held, is_last)
            reasoning, self._held = self._held[:end], self._held[end:]
            if not self._held.startswith(END):
                return reasoning, ""
            self._state, self._held = "space", self._held[len(END) :]
        if self._state == "space":  # between the reasoning and the answer
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "after"
        rest, self._held = self._held, ""
        return reasoning, rest


def begins_inside(prompt: str | None) -> bool:
    """Whether the prompt has opened the reasoning, so that the answer has only its end."""
    return prompt is not None and prompt.rstrip().endswith(BEGIN)

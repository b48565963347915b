"""Splits an answer into reasoning and content while its text arrives."""

from nanovllm.reasoning.harmony import HarmonyReasoning
from nanovllm.reasoning.stage import Reasoning, Stage
from nanovllm.serve.harmony_parser import HarmonyParser
from nanovllm.serve.tool_parsers import HarmonyToolParser, ToolParser, length_before


def make_reasoning_parser(reasoning: Reasoning, tools: ToolParser | None = None) -> "ReasoningParser | HarmonyParser":
    """Return a parser for an answer that begins in the state `reasoning`. `tools` finds calls."""
    if isinstance(reasoning, HarmonyReasoning):
        return HarmonyParser(reasoning, isinstance(tools, HarmonyToolParser))
    return ReasoningParser(reasoning)


class ReasoningParser:
    """Splits the text of one answer into reasoning and content. The token ids determine where the reasoning ends."""

    def __init__(self, reasoning: Reasoning):
        """reasoning: the reasoning state at the beginning of the answer. No other object may use this Reasoning."""
        self.reasoning = reasoning
        self._begin, self._end = (marker.decode() for marker in (reasoning.markers.begin, reasoning.markers.end))
        self._held = ""  # text that may be part of a marker, or white space between the reasoning and the answer
        self._num_ends = 0  # how often the text of the end marker has occurred
        # in order: "before", "opened" (the reasoning has no text yet), "inside", "space" (after the reasoning), "after"
        self._place = {Stage.BEFORE: "before", Stage.INSIDE: "opened", Stage.ENDED: "after"}[reasoning.stage]

    @property
    def is_over(self) -> bool:
        """True if the reasoning has ended, so all further text is content."""
        return self._place == "after"

    def feed(self, text: str, is_last: bool = False, token_ids: list[int] | None = None) -> tuple[str, str]:
        """Return the new reasoning and the new answer text. Text that may be part of a marker is held back.

        token_ids: all new token ids, including those whose text comes later; `None` if unknown.
        """
        if token_ids is None:
            self.reasoning.take_text(text.encode())
        else:
            self.reasoning.take(token_ids)
        self._held += text
        if self._place in ("before", "opened"):
            if text.isspace() and not is_last:
                return "", ""
            if not (self._passes_begin(is_last) if self._place == "before" else self._passes_repetition(is_last)):
                return "", ""
        reasoning = self._take_reasoning(is_last)
        if self._place == "space":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._place = "after"
        if self._place != "after":
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def _passes_begin(self, is_last: bool) -> bool:
        begun = self._held.lstrip()
        if self.reasoning.has_begun and begun.startswith(self._begin):
            self._place, self._held = "inside", begun[len(self._begin) :]
        elif is_last or (self.reasoning.stage is Stage.ENDED and not self.reasoning.has_begun):
            self._place = "after"
        return self._place != "before"

    def _passes_repetition(self, is_last: bool) -> bool:
        """Drop the begin marker if the reasoning began in the prompt and the model repeats the marker.

        Return False if more text is needed.
        """
        begun = self._held.lstrip()
        if not is_last and self._begin.startswith(begun):
            return False
        self._place, self._held = "inside", begun[len(self._begin) :] if begun.startswith(self._begin) else self._held
        return True

    def _take_reasoning(self, is_last: bool) -> str:
        taken = ""
        while self._place == "inside":
            length = length_before(self._end, self._held, is_last)
            taken, self._held = taken + self._held[:length], self._held[length:]
            if not self._held.startswith(self._end):
                break
            self._held, self._num_ends = self._held[len(self._end) :], self._num_ends + 1
            if self.reasoning.stage is Stage.ENDED and self._num_ends == self.reasoning.num_ends:
                self._place = "space"
            else:
                taken += self._end  # ordinary tokens spell this text, so it is not the marker
        return taken

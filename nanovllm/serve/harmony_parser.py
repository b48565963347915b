"""Splits an answer in the harmony format (reasoning/harmony.py) into reasoning and content while its text arrives."""

import re
from collections import deque

from nanovllm.reasoning.harmony import CONTROLS, ENDS, MESSAGE, HarmonyReasoning, is_analysis
from nanovllm.serve.tool_parsers import HarmonyToolParser, length_before

CONTROL = re.compile("|".join(map(re.escape, CONTROLS)))
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
MAX_CONTROL = max(map(len, CONTROLS))
BETWEEN = "\n\n"  # between two messages of the same kind


class HarmonyParser:
    """Splits the text of one answer. The token ids determine which controls are tokens, and which are only spelled."""

    is_over = False  # another message may follow

    def __init__(self, reasoning: HarmonyReasoning, marks_calls: bool = False):
        """reasoning: the state at the beginning of the answer. No other object may use this state.

        marks_calls: whether a HarmonyToolParser gets the content, so that calls keep their markers.
        """
        self.reasoning, self._marks_calls = reasoning, marks_calls
        self._held = ""  # text that may be a part of a control
        self._tail = b""  # the bytes of the last tokens, in which a spelled control may begin
        self._are_tokens: deque[bool] = deque()  # of each control whose text has not arrived, whether it is a token
        self._header: list[str] | None = [reasoning.header_text]  # of the current message; None in its body
        self._texts: tuple[list[str], list[str]] = [], []  # reasoning and content that `feed` will return
        self._has_text = [False, False]  # whether there was reasoning, and content
        self._place = 1  # of the body in `_texts`
        self._is_call = self._is_first = False
        if reasoning.is_body:
            self._begin_body()

    def feed(self, text: str, is_last: bool = False, token_ids: list[int] | None = None) -> tuple[str, str]:
        """Return the new reasoning and the new answer text. Text that may be part of a control is held back.

        token_ids: all new token ids, even if their text comes later; `None` if unknown.
        """
        self.reasoning.take(token_ids or ())
        for token_id in token_ids or ():
            self._find_controls(token_id)
        held, place, searched = self._held + text, 0, 0
        for match in CONTROL.finditer(held):
            searched = match.end()
            if self._are_tokens.popleft() if self._are_tokens else True:
                self._add(held[place : match.start()])
                self._take_control(match[0])
                place = match.end()
        end = searched + min(length_before(control, held[searched:], is_last) for control in CONTROLS)
        self._add(held[place:end])
        self._held = held[end:]
        if is_last and self._header and not any(self._has_text):
            written = "".join(self._header[1:])  # the first part is from the prompt
            if CONTROL.search(written) is None:
                self._texts[1].append(written)  # the model does not use the format
        reasoning, content = ("".join(texts) for texts in self._texts)
        self._texts = [], []
        return reasoning, content

    def _find_controls(self, token_id: int) -> None:
        if token_id in self.reasoning.markers.controls:
            self._are_tokens.append(True)
            self._tail = b""
            return
        self._tail += self.reasoning.markers.token_bytes[token_id]
        *spelled, last = CONTROL.split(self._tail.decode("latin-1"))
        self._are_tokens += [False] * len(spelled)
        self._tail = last[1 - MAX_CONTROL :].encode("latin-1")

    def _take_control(self, control: str) -> None:
        if self._header is None and control in ENDS:
            if self._is_call:
                self._add("{}" if self._is_first else "")
                self._texts[1].append(HarmonyToolParser.END)
            self._header = []
        elif self._header is not None and control == MESSAGE:
            self._begin_body()
        else:
            self._add(control)

    def _begin_body(self) -> None:
        header, self._header, self._is_first = "".join(self._header or ()), None, True
        self._place = 0 if is_analysis(header) else 1
        recipient = RECIPIENT.search(header)
        self._is_call = self._marks_calls and self._place == 1 and recipient is not None
        if self._is_call and recipient is not None:
            self._begin = HarmonyToolParser.begin(recipient[1])

    def _add(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
            return
        if not text:
            return
        if self._is_first:
            text = (self._begin if self._is_call else BETWEEN if self._has_text[self._place] else "") + text
            self._is_first, self._has_text[self._place] = False, True
        self._texts[self._place].append(text)

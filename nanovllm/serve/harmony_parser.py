"""Splits an answer in the harmony format (reasoning/harmony.py) while its text arrives."""

import json
import re
from collections import deque
from typing import Any

from nanovllm.reasoning.harmony import CONTROLS, ENDS, MESSAGE, START, HarmonyReasoning, is_analysis
from nanovllm.serve.tool_parsers import Part, ToolCall, length_before, parsed

CONTROL = re.compile("|".join(map(re.escape, CONTROLS)))
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
MAX_CONTROL = max(map(len, CONTROLS))
BETWEEN = "\n\n"  # is put between two messages of the same kind


class HarmonyParser:
    """Splits the text of one answer into reasoning, content and calls.

    A *control* is a text such as `<|start|>`. The token ids show whether a control is a special token or consists of
    ordinary tokens.
    """

    is_over = False  # another message may follow

    def __init__(self, reasoning: HarmonyReasoning, finds_calls: bool = False):
        """reasoning: the reasoning state at the beginning of the answer. No other object may use this HarmonyReasoning.

        finds_calls: True to parse messages with a recipient as calls. If False, messages with a recipient are content.
        """
        self.reasoning, self._finds_calls = reasoning, finds_calls
        self._held = ""  # text that may be a part of a control
        self._tail = b""  # the bytes of the last tokens, which may be the beginning of a spelled control
        self._are_tokens: deque[bool] = deque()  # for each control whose text has not arrived: is it a token?
        self._header: list[str] | None = [reasoning.header_text]  # the current message's header; None in its body
        self._parts: tuple[list[Any], list[Any]] = [], []  # reasoning and content that `feed` will return
        self._has_text = [False, False]  # whether there was any reasoning, and any content
        self._place = 1  # the index in `_parts` of the current body
        self._is_first = False  # whether the next text is the first text of the body
        self._call: tuple[str, list[str]] | None = None  # the name and the text of the current call
        if reasoning.is_body:
            self._begin_body()

    def feed(
        self, text: str, is_last: bool = False, token_ids: list[int] | None = None
    ) -> tuple[str, str | list[Part]]:
        """Return the new reasoning and the new content.

        Text that may be part of a control such as `<|start|>` is held back. If `finds_calls` is True, the content is a
        list of texts and complete calls, so that no text is mistaken for a call. If the arguments of a call are not a
        JSON object, the call becomes a text.

        token_ids: all new token ids, including those whose text comes later; `None` if unknown.
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
        if is_last:
            self._end_call()
        if is_last and self._header:
            written = "".join(self._header[1:])  # the first element comes from the prompt
            if written and CONTROL.search(written) is None:
                self._parts[1].append(written)  # the model does not use the format
        (reasoning, content), self._parts = self._parts, ([], [])
        return "".join(reasoning), content if self._finds_calls else "".join(content)

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
        if self._header is None and control in (START, *ENDS):
            self._end_call()
            self._header = ["", control]
        elif self._header is not None and control == MESSAGE:
            self._begin_body()
        else:
            self._add(control)

    def _begin_body(self) -> None:
        header, self._header, self._is_first = "".join(self._header or ()), None, True
        self._place = 0 if is_analysis(header) else 1
        recipient = RECIPIENT.search(header)
        if self._finds_calls and self._place == 1 and recipient is not None:
            self._call = recipient[1], []

    def _end_call(self) -> None:
        if self._call is None:
            return
        (name, texts), self._call = self._call, None
        text = "".join(texts)
        arguments = parsed(text) if text.strip() else {}
        if isinstance(arguments, dict):
            self._parts[1].append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        else:
            self._add(text)

    def _add(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
            return
        if self._call is not None:
            self._call[1].append(text)
        elif text:
            if self._is_first:
                text = BETWEEN * self._has_text[self._place] + text
                self._is_first, self._has_text[self._place] = False, True
            self._parts[self._place].append(text)

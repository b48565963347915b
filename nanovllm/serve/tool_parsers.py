"""Calls of tools within generated text, found while the text arrives.

A parser is fed pieces of one answer. It returns the text that is content, and the calls that are complete. Text that
may belong to a call is held back; text that turns out not to be a valid call is content.
"""

import json
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


Found = tuple[str, list[ToolCall]]


class ToolParser:
    """Finds nothing: all text is content."""

    _held = ""  # text that may belong to a call

    def feed(self, text: str, is_last: bool = False) -> Found:
        """The content and the complete calls in `text` and in what was held back; nothing is held back at the end."""
        return text, []


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3. Any number, between text."""

    BEGIN, END = "<tool_call>", "</tool_call>"  # what is held begins with BEGIN or a part of it, or is only space
    _has_call = False

    def feed(self, text: str, is_last: bool = False) -> Found:
        self._held += text
        content, calls = [], []
        while self._held:
            content.append(self._take(length_before(self.BEGIN, self._held, is_last)))
            if not self._held.startswith(self.BEGIN):
                break
            end = self._held.find(self.END)
            if end < 0 and not is_last:
                break
            inner = self._held[len(self.BEGIN) : end if end >= 0 else None]
            whole = self._take(end + len(self.END) if end >= 0 else len(self._held))
            if (call := _call_of(parsed(inner), "arguments")) is not None:
                calls.append(call)
                self._has_call = True
            else:
                content.append(whole)
        text = "".join(content)
        # templates put line ends between calls
        return ("" if self._has_call and not text.strip() else text), calls

    def _take(self, num_characters: int) -> str:
        taken, self._held = self._held[:num_characters], self._held[num_characters:]
        return taken


class Llama3Parser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or several with `;` between them: Llama 3.1 and later.

    The special token `<|python_tag|>` may come first; it is usually not part of the text.
    """

    TAG = "<|python_tag|>"
    _has_call = False
    _is_content = False  # the answer has begun with something else, or continues with it

    def feed(self, text: str, is_last: bool = False) -> Found:
        if self._is_content:
            return text, []
        self._held += text
        calls: list[ToolCall] = []
        if "{" in self._held and "}" not in text and not is_last:
            return "", []  # no object ends here: do not parse what is there again for each token
        while rest := self._held.removeprefix(self.TAG).lstrip(" \n;" if self._has_call else " \n"):
            may_be_tag = self.TAG.startswith(rest)
            if not rest.startswith("{") and not (may_be_tag and not is_last):
                return self._give_up(), calls
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return (self._give_up() if is_last else ""), calls  # it is incomplete, or no JSON
            call = _call_of(value, "parameters") or _call_of(value, "arguments")
            if call is None:
                return self._give_up(), calls
            calls.append(call)
            self._has_call, self._held = True, rest[end:]
        return "", calls

    def _give_up(self) -> str:
        self._is_content = True
        held, self._held = self._held, ""
        return held


class WholeParser(ToolParser):
    """The whole answer is JSON that describes the calls, as structured output makes it. It is content if it was cut.

    `[{"name": ..., "parameters": {...}}, ...]`: for `tool_choice="required"`. With the name of a function, it is the
    arguments of one call: for a named `tool_choice`.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def feed(self, text: str, is_last: bool = False) -> Found:
        self._held += text
        if not is_last:
            return "", []
        value = parsed(self._held)
        if self._name is not None:
            return ("", [ToolCall(self._name, self._held)]) if isinstance(value, dict) else (self._held, [])
        calls = [_call_of(item, "parameters") for item in value] if isinstance(value, list) else [None]
        return (self._held, []) if None in calls else ("", [call for call in calls if call is not None])


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3Parser, "none": ToolParser}


def parser_for(chat_template: str | None) -> str:
    """The name of the parser for what a model writes, from the chat template that tells the model how to write it."""
    if chat_template and "<tool_call>" in chat_template:
        return "hermes"
    return "llama3_json" if chat_template and '"parameters"' in chat_template else "none"


def parsed(text: str) -> Any:
    """The value of JSON; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, key: str) -> ToolCall | None:
    """The call that a JSON value describes, or None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        return None
    return ToolCall(value["name"], json.dumps(value[key], ensure_ascii=False))


def length_before(tag: str, text: str, is_last: bool) -> int:
    """How many characters stand before the tag, or, unless the text ends here, before what may be its beginning."""
    if (begin := text.find(tag)) >= 0 or is_last:
        return begin if begin >= 0 else len(text)
    longest = min(len(text), len(tag) - 1)
    return len(text) - next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)

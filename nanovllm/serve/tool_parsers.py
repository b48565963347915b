"""Calls of tools within generated text, found while the text arrives.

A parser is fed pieces of one answer. It returns the text that is content, and the calls that are complete. Text that
may belong to a call is held back; text that turns out not to be a valid call is content. How the answer is cut into
pieces changes nothing.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


Found = tuple[str, list[ToolCall]]


class ToolParser:
    """Finds nothing: all text is content."""

    markers: ClassVar[tuple[str, ...]] = ()  # what a call begins with, and what stands within it, if not plain text

    def __init__(self, schemas: Mapping[str, Any] = MappingProxyType({})):
        """schemas: the JSON schemas of the arguments, by the names of the functions."""
        self._schemas = schemas
        self._held = ""  # text that may belong to a call

    def feed(self, text: str, is_last: bool = False) -> Found:
        """The content and the complete calls in `text` and in what was held back; nothing is held back at the end."""
        return text, []

    @staticmethod
    def new_id() -> str:
        """The id of a call. The model reads it in the next turn."""
        return f"call_{secrets.token_hex(12)}"


class MarkedParser(ToolParser):
    """Any number of calls, each behind a marker, and text between them.

    White space is no content where it has nothing but calls, the beginning or the end around it.
    """

    blank: ClassVar[str | None] = None  # what may stand between calls; None is white space
    _has_call = False
    _space: str | None = ""  # white space since the last call or the beginning; None: there is other text

    def feed(self, text: str, is_last: bool = False) -> Found:
        self._held += text
        content, calls = "", []
        while self._held:
            content += self._content(self._take(self._length_before_call(is_last)))
            if not self._is_at_call():
                break
            if (found := self._read_call(text, is_last)) is None:
                break
            new, length = found
            if new:
                calls += new
                self._has_call, self._space = True, ""
                self._take(length)
            else:
                content += self._content(self._take(length))
        if is_last and not self._has_call:
            content, self._space = content + (self._space or ""), None
        return content, calls

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        """The calls that what is held begins with, and their length. Without calls, so much is content.

        None if more is needed to know. new: the end of what is held, which was not there the last time.
        """
        raise NotImplementedError

    def _is_at_call(self) -> bool:
        return self._held.startswith(self.markers)

    def _length_before_call(self, is_last: bool) -> int:
        return min(length_before(marker, self._held, is_last) for marker in self.markers)

    def _content(self, text: str) -> str:
        if self._space is not None:
            self._space += text
            if not self._space.strip(self.blank):
                return ""
            text, self._space = self._space, None
        return text

    def _take(self, num_characters: int) -> str:
        taken, self._held = self._held[:num_characters], self._held[num_characters:]
        return taken


class HermesParser(MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    BEGIN, END = "<tool_call>", "</tool_call>"

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        start = len(self.BEGIN)
        # a marker that is new begins there at the earliest
        end = self._held.find(self.END, max(start, len(self._held) - len(new) - len(self.END)))
        while end >= 0 and _is_in_string(self._held[start:end]):
            end = self._held.find(self.END, end + 1)
        if end < 0:
            if not is_last:
                return None
            end = self._held.find(self.END)  # a string that does not end, or none
        inner, length = (self._held[start:end], end + len(self.END)) if end >= 0 else (self._held[start:], None)
        return _calls_in(inner, "arguments"), len(self._held) if length is None else length


class XmlParser(HermesParser):
    """XML with a tag for each parameter: Qwen3-Coder, Qwen3.5 and later. Arguments have the types of their schemas.

        <tool_call>
        <function=NAME>
        <parameter=NAME>
        value
        </parameter>
        </function>
        </tool_call>

    The models sometimes leave out the first line, or write JSON instead.
    """

    markers = ("<tool_call>", "<function=")
    # the text of a value may have any of these tags within it
    FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>(?=\s*(?:<function=|</tool_call>|\Z))", re.DOTALL)
    PARAMETER = re.compile(
        r"<parameter=([^>\n]+)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|\Z))|(?=<parameter=)|\Z)", re.DOTALL
    )
    CALL_END = re.compile(r"</function>\s*</tool_call>")
    BARE_END = re.compile(r"(?:</parameter>|<function=[^>\n]+>)\s*</function>(?=(\s*)(.*))", re.DOTALL)

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        is_bare = not self._held.startswith(self.BEGIN)
        inner = self._held.removeprefix(self.BEGIN).lstrip()
        if not is_bare and not "<function=".startswith(inner[: len("<function=")]):
            return super()._read_call(new, is_last)
        if not (is_last or is_bare or ">" in new):
            return None
        length = self._bare_length(is_last) if is_bare else self._marked_length()
        if length is None and not is_last:
            return None
        text = self._held if length is None else self._held[:length]
        functions = self.FUNCTION.findall(text.removeprefix(self.BEGIN).removesuffix(self.END))
        return [self._call(name.strip(), body) for name, body in functions], len(text)

    def _marked_length(self) -> int | None:
        end = self.CALL_END.search(self._held)
        return None if end is None else end.end()

    def _bare_length(self, is_last: bool) -> int | None:
        if (end := self.BARE_END.search(self._held)) is None:
            return None
        space, rest = end.groups()
        if rest.startswith(self.END):
            return end.end() + len(space) + len(self.END)
        return end.end() if is_last or not self.END.startswith(rest) else None

    def _call(self, name: str, body: str) -> ToolCall:
        schema = self._schemas.get(name) or {}
        values = {key.strip(): _plain_value(text) for key, text in self.PARAMETER.findall(body)}
        return _call(name, {key: _typed(text, schema, key) for key, text in values.items()})


class MistralParser(MarkedParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    An id that a call has, behind `[CALL_ID]`, is not used.
    """

    markers = ("[TOOL_CALLS]",)
    HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        if not is_last and "]" not in new and "}" not in new:
            return None  # no value ends here: do not parse what is there again for each token
        body = self._held[len(self.markers[0]) :].lstrip()
        head = self.HEAD.match(body)
        start = head.end() if head else 0
        if (found := _json_at(body, start)) is None:
            return ([], len(self._held)) if is_last else None
        value, end = found
        length = len(self._held) - len(body) + end
        if head:
            return ([_call(head[1], value)] if isinstance(value, dict) else []), length
        return _calls_of(value, "arguments"), length

    @staticmethod
    def new_id() -> str:
        """Its templates refuse other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class DeepSeekParser(MarkedParser):
    """A list of calls between special tokens: DeepSeek-R1 and its distillations, V3, and V3.1, which has no fence."""

    BAR, LOW = "\uff5c", "\u2581"  # of the tokens' names
    markers = (f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",)
    END = f"<{BAR}tool{LOW}calls{LOW}end{BAR}>"
    BEGIN_CALL, END_CALL = f"<{BAR}tool{LOW}call{LOW}begin{BAR}>", f"<{BAR}tool{LOW}call{LOW}end{BAR}>"
    CALL = re.compile(f"{BEGIN_CALL}(.*?)<{BAR}tool{LOW}sep{BAR}>(.*?){END_CALL}", re.DOTALL)

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        end = self._held.find(self.END)
        if end < 0 and not is_last:
            return None
        length = len(self._held) if end < 0 else end + len(self.END)
        calls = []
        for head, body in self.CALL.findall(self._held[:length]):
            name, fence, arguments = body.partition("```json")
            name, text = (name, arguments.rpartition("```")[0]) if fence else (head, body)
            if not isinstance(value := parsed(text), dict):
                return [], length
            calls.append(_call(name.strip(), value))
        return calls, length


class Llama3Parser(MarkedParser):
    """`{"name": ..., "parameters": {...}}`, or several with `;` between them: Llama 3.1 and later.

    They are the whole answer, or stand behind the special token `<|python_tag|>`.
    """

    markers = ("<|python_tag|>",)
    blank = " \t\r\n;"

    def _length_before_call(self, is_last: bool) -> int:
        return 0 if self._is_at_call() else super()._length_before_call(is_last)

    def _is_at_call(self) -> bool:
        is_alone = self._space is not None and self._held.lstrip(self.blank).startswith("{")
        return is_alone or super()._is_at_call()

    def _read_call(self, new: str, is_last: bool) -> tuple[list[ToolCall], int] | None:
        if not is_last and "}" not in new:
            return None  # no object ends here: do not parse what is there again for each token
        rest = self._held.removeprefix(self.markers[0]).lstrip(self.blank)
        if (found := _json_at(rest)) is None:
            return ([], len(self._held)) if is_last else None  # it is incomplete, or no JSON
        value, end = found
        call = _call_of(value, "parameters") or _call_of(value, "arguments")
        length = len(self._held) - len(rest) + end
        return [call] if call else [], length


class WholeParser(ToolParser):
    """The whole answer is JSON that describes the calls, as structured output makes it. It is content if it was cut.

    `[{"name": ..., "parameters": {...}}, ...]`: for `tool_choice="required"`. With the name of a function, it is the
    arguments of one call: for a named `tool_choice`.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str, is_last: bool = False) -> Found:
        self._held += text
        if not is_last:
            return "", []
        value = parsed(self._held)
        if self._name is not None:
            return ("", [ToolCall(self._name, self._held)]) if isinstance(value, dict) else (self._held, [])
        calls = _calls_of(value, "parameters") if isinstance(value, list) else []
        return ("", calls) if calls else (self._held, [])


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": XmlParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "none": ToolParser,
}
# what the template of a model that calls tools has, by the name of its parser: the first that is found
SIGNS = {
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": DeepSeekParser.markers[0],
    "qwen3_coder": "<function=",
    "hermes": "<tool_call>",
    "llama3_json": '"parameters"',
}


def parser_for(chat_template: str) -> str | None:
    """The name of the parser for what a model writes, from the chat template that tells the model how to write it.

    None if the template shows no format that is known.
    """
    return next((name for name, sign in SIGNS.items() if sign in chat_template), None)


# -- JSON as models write it -------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    if (value := float(text)) in (float("inf"), -float("inf")):
        raise ValueError(f"{text} is too large a number")
    return value


# strings may have line ends and tabs as they are; what has no JSON form, and so can't be handed on, is refused
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BETWEEN = " \t\r\n,;"  # what may stand between two calls


def parsed(text: str) -> Any:
    """The value of JSON; None if it is no JSON."""
    found = _json_at(text.strip())
    return found[0] if found is not None and found[1] == len(text.strip()) else None


def _json_at(text: str, start: int = 0) -> tuple[Any, int] | None:
    """The value that begins there, and its end; None if there is none, or not all of it."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _is_in_string(text: str) -> bool:
    """Whether JSON that begins like this is within a string at the end."""
    return '"' in _STRING.sub("", text)


def _calls_in(text: str, key: str) -> list[ToolCall]:
    """The calls that JSON values describe, one behind the other; none if anything else is there."""
    calls: list[ToolCall] = []
    start = len(text) - len(text.lstrip(_BETWEEN))
    while start < len(text):
        if (found := _json_at(text, start)) is None or not (new := _calls_of(found[0], key)):
            return []
        calls, rest = calls + new, text[found[1] :]
        start = len(text) - len(rest.lstrip(_BETWEEN))
    return calls


def _calls_of(value: Any, key: str) -> list[ToolCall]:
    """The calls of a value or a list of them; none if any is no call."""
    calls = [_call_of(item, key, may_lack=True) for item in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call_of(value: Any, key: str, may_lack: bool = False) -> ToolCall | None:
    """The call that a JSON value describes, or None if it is none. may_lack: it is one without arguments as well."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key)
    if arguments is None and may_lack:
        arguments = {}
    if isinstance(arguments, str):  # some models write it as OpenAI's clients do
        arguments = parsed(arguments)
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def length_before(tag: str, text: str, is_last: bool) -> int:
    """How many characters stand before the tag, or, unless the text ends here, before what may be its beginning."""
    if (begin := text.find(tag)) >= 0 or is_last:
        return begin if begin >= 0 else len(text)
    longest = min(len(text), len(tag) - 1)
    return len(text) - next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


# -- values by their schemas -------------------------------------------------------------------------------------------

_TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def _plain_value(text: str) -> str:
    """The text between two tags, without the line end behind the first one and the one before the second one."""
    return text.removeprefix("\r\n" if text.startswith("\r\n") else "\n").removesuffix("\n").removesuffix("\r")


def _typed(text: str, schema: Any, key: str) -> Any:
    """A parameter's value, of one of the types that its schema allows. It is text where that fits, or nothing does."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    types = _types_of(properties.get(key) if isinstance(properties, dict) else None, schema)
    word = text.strip().lower()
    if word in ("null", "none") and "null" in types:
        return None
    if "string" in types:
        return text
    value = parsed(word if word in ("true", "false") else text)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    for name in types & _TYPES.keys():
        if isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            return value
    return text


def _types_of(schema: Any, root: Any, depth: int = 8) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    types = schema.get("type")
    found = {types} if isinstance(types, str) else {name for name in types or () if isinstance(name, str)}
    if schema.get("nullable") is True:
        found.add("null")
    if isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
        target = root
        for name in path[2:].split("/"):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        found |= _types_of(target, root, depth - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(name) or ():
            found |= _types_of(option, root, depth - 1)
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]:
        other = "null" if value is None else "string"
        found |= {name for name, kind in _TYPES.items() if isinstance(value, kind)} or {other}
    return found

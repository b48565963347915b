"""Finds tool calls in generated text, while the text arrives.

A parser takes the pieces of one answer, and returns content and complete calls in order. The parser holds back text
that may belong to a call. If the text is not a valid call, it becomes content. The results do not depend on how the
answer is cut into pieces.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from nanovllm.structured_outputs.json_schema import referred


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


Part = str | ToolCall  # content or a call


class ToolParser:
    """A parser that finds no calls: all text is content."""

    markers: ClassVar[tuple[str, ...]] = ()  # texts that begin a call, and special texts within a call

    def __init__(self, schemas: Mapping[str, Any] = MappingProxyType({})):
        """schemas: the JSON schemas of the arguments, by function name."""
        self._schemas = schemas
        self._held = ""  # text that may belong to a call

    def feed(self, text: str, is_last: bool = False) -> list[Part]:
        """Append `text` to the held text. Return the content and the complete calls in the held text.

        If `is_last` is True, no text is held back.
        """
        return [text] if text else []

    @staticmethod
    def new_id() -> str:
        """Return a new id for a call. The model reads the id in the next turn."""
        return f"call_{secrets.token_hex(12)}"


class MarkedParser(ToolParser):
    """A parser for answers with any number of calls, and text between calls. Each call begins with a marker.

    A call consists of a head and a body, which begins with the arguments. White space around calls is not content. The
    parsing time is linear in the length of the text, whatever the size of the pieces.
    """

    HEAD: ClassVar[re.Pattern[str]]  # matches the head with its marker; at most MAX_HEAD characters
    closers: ClassVar[tuple[str, ...]] = ()  # texts after a call that are not content
    BLANK: ClassVar[re.Pattern[str]] = re.compile(r"\s*")  # text between calls that is not content
    _marker: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        cls._marker = re.compile("|".join(map(re.escape, cls.markers)))

    def __init__(self, schemas: Mapping[str, Any] = MappingProxyType({})):
        super().__init__(schemas)
        self._start = 0  # an index in the held text; all text before it has been returned
        self._head: re.Match[str] | None = None  # the head of the call that begins at `_start`
        self._has_call = self._is_after_call = False
        self._space: list[str] | None = []  # white space after the last call or the beginning; None after other text

    def feed(self, text: str, is_last: bool = False) -> list[Part]:
        held, self._held = self._held, ""  # if there is only one reference, += works in place
        held += text
        self._held = held
        parts: list[Part] = []
        while self._start < len(held):
            if self._is_after_call and not self._passes_closers(is_last):
                break
            parts.append(self._content(self._call_start(is_last)))
            if not self._is_at_call():
                break
            if (call_and_end := self._read_call(is_last)) is None:
                break
            self._head, (new, end) = None, call_and_end
            if new:
                parts += new
                self._has_call, self._is_after_call, self._space, self._start = True, True, [], end
            else:
                parts.append(self._content(end))
        if self._start:
            self._held, self._start, self._head = held[self._start :], 0, None
        if is_last and not self._has_call:
            parts, self._space = [*parts, *(self._space or ())], None
        return [part for part in parts if part]

    def _read_call(self, is_last: bool) -> tuple[list[ToolCall], int] | None:
        """Return the calls that begin at `_start`, and the index where they end. Return None if more text is needed.

        If the list of calls is empty, the text up to the returned index is content.
        """
        start, held = self._start, self._held
        if self._head is None:
            if (head := self.HEAD.match(held, start, start + MAX_HEAD)) is None:
                return ([], start + 1) if is_last or len(held) >= start + MAX_HEAD else None
            self._head = head
            self._begin_body(head)
        if (result := self._read_body(self._head, is_last)) is None and is_last:
            return [], len(held)  # the call was cut off
        return result

    def _begin_body(self, head: re.Match[str]) -> None:
        raise NotImplementedError

    def _read_body(self, head: re.Match[str], is_last: bool) -> tuple[list[ToolCall], int] | None:
        """Continue `_read_call` after the head. Search only new text."""
        raise NotImplementedError

    def _takes_bare_call(self) -> bool:
        """Return whether a JSON object without a marker is a call at this point."""
        return False

    def _is_at_call(self) -> bool:
        is_bare = self._takes_bare_call() and self._held.startswith("{", self._start)
        return is_bare or self._held.startswith(self.markers, self._start)

    def _call_start(self, is_last: bool) -> int:
        """Return the index where the next call begins, or where it may begin if more text follows."""
        held = self._held
        begin = _end_of(self.BLANK, held, self._start)
        if self._takes_bare_call() and held.startswith("{", begin):
            return begin
        if (match := self._marker.search(held, self._start)) is not None:
            return match.start()
        tail = held[max(self._start, len(held) - max(map(len, self.markers))) :]
        return len(held) - len(tail) + min(length_before(marker, tail, is_last) for marker in self.markers)

    def _passes_closers(self, is_last: bool) -> bool:
        """Skip the texts in `closers` that follow a call. Return False if more text is needed."""
        while True:
            self._content(_end_of(self.BLANK, self._held, self._start))
            following = self._held[self._start : self._start + max(map(len, self.closers), default=0)]
            closer = next((x for x in self.closers if following.startswith(x)), None)
            if closer is None:
                break
            self._start, self._space = self._start + len(closer), []
        if not is_last and any(x.startswith(following) for x in self.closers):
            return False
        self._is_after_call = self._held.startswith("{", self._start)
        return True

    def _content(self, end: int) -> str:
        """Move `_start` to `end`.

        Return the text from the old to the new `_start`, or "" if this text may be white space around a call.
        """
        text, self._start = self._held[self._start : end], end
        if self._space is not None:
            self._space.append(text)
            if self.BLANK.fullmatch(text):
                return ""
            text, self._space = "".join(self._space), None
            self._is_after_call = False
        return text


class JsonParser(MarkedParser):
    """A parser for calls with JSON arguments.

    The name of the called function is a part of the JSON, or precedes the JSON. In the second case, the group "name" of
    `HEAD` matches the name.
    """

    def _begin_body(self, head: re.Match[str]) -> None:
        self._json = JsonScanner(head.end())

    def _read_body(self, head: re.Match[str], is_last: bool) -> tuple[list[ToolCall], int] | None:
        try:
            end = self._json.end(self._held)
        except ValueError:
            return [], self._start + 1
        if end is None:
            return None
        value = parsed(self._held[head.end() : end])
        if not (name := head.groupdict().get("name")):
            return _calls_of(value, self._may_lack_arguments(head)), end
        return ([_call(name.strip(), value)] if isinstance(value, dict) else []), end

    def _may_lack_arguments(self, head: re.Match[str]) -> bool:
        """Return True if an object with a name but without arguments is a call."""
        return True


class HermesParser(JsonParser):
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3).

    The models sometimes omit the closing tag, write one `}` too many, or write several objects.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    HEAD = re.compile(r"(?:<tool_call>)?\s*(?=[{\[])")
    closers = ("</tool_call>", "}")

    def _takes_bare_call(self) -> bool:
        return self._is_after_call


class XmlParser(HermesParser):
    """Parses XML with a tag for each parameter (Qwen3-Coder, Qwen3.5 and later).

    The types of the arguments come from the schemas.

    ```xml
    <tool_call>
    <function=NAME>
    <parameter=NAME>
    value
    </parameter>
    </function>
    </tool_call>
    ```

    The models sometimes omit the first line or the line `</function>`. Sometimes the models write JSON instead of XML.
    """

    CALL, CALL_END, FUNCTION_END, PARAMETER_END = "<tool_call>", "</tool_call>", "</function>", "</parameter>"
    markers = (CALL, "<function=")
    HEAD = re.compile(
        r"(?:<(?:seed:)?tool_call>)?\s*"
        r"(?:<function=(?P<function>[^>\n]+)>\s*(?=<parameter=|</function>|</(?:seed:)?tool_call>)|(?=[{\[]))"
    )
    # a value may contain these tags as text
    FUNCTION = re.compile(
        r"<function=([^>\n]+)>(.*?)</function>(?=\s*(?:(?:<(?:seed:)?tool_call>\s*)?<function=|\Z))", re.DOTALL
    )
    PARAMETER = re.compile(
        r"<parameter=([^>\n]+)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|\Z))|(?=\n<parameter=)|\Z)", re.DOTALL
    )

    def _begin_body(self, head: re.Match[str]) -> None:
        super()._begin_body(head)
        self._searched = head.end()

    def _read_body(self, head: re.Match[str], is_last: bool) -> tuple[list[ToolCall], int] | None:
        if head["function"] is None:
            return super()._read_body(head, is_last)
        is_marked = self._held.startswith(self.CALL, self._start)
        tag = self.CALL_END if is_marked else self.FUNCTION_END
        before = (self.PARAMETER_END, self.FUNCTION_END) if is_marked else (self.PARAMETER_END,)
        while (place := self._held.find(tag, self._searched)) >= 0:
            self._searched, last = place + len(tag), place
            while last > head.end() and self._held[last - 1].isspace():
                last -= 1
            if last == head.end() or self._held.endswith(before, head.end(), last):
                return self._calls(self._held[self._start : self._searched]), self._searched
        self._searched = max(self._searched, len(self._held) - len(tag) + 1)
        calls = self._calls(self._held[self._start :]) if is_last and is_marked else []  # the end tag was a stop string
        return (calls, len(self._held)) if calls else None

    def _calls(self, text: str) -> list[ToolCall]:
        if text.endswith(self.CALL_END):
            text = text.removesuffix(self.CALL_END).rstrip().removesuffix(self.FUNCTION_END) + self.FUNCTION_END
        return [self._call(name.strip(), body) for name, body in self.FUNCTION.findall(text)]

    def _call(self, name: str, body: str) -> ToolCall:
        schema = self._schemas.get(name) or {}
        values = {key.strip(): _plain_value(text) for key, text in self.PARAMETER.findall(body)}
        return _call(name, {key: _typed(text, schema, key) for key, text in values.items()})


class SeedParser(XmlParser):
    """Parses the same XML as XmlParser, but between `<seed:tool_call>` and `</seed:tool_call>` (Seed-OSS)."""

    CALL, CALL_END = "<seed:tool_call>", "</seed:tool_call>"
    markers = (CALL, "<function=")
    closers = (CALL_END, "}")


class MistralParser(JsonParser):
    """Parses `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or one `[TOOL_CALLS]name[ARGS]{...}` per call.

    An id after `[CALL_ID]` is ignored.
    """

    markers = ("[TOOL_CALLS]",)
    HEAD = re.compile(
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)|(?=[{\[]))"
    )

    @staticmethod
    def new_id() -> str:
        """Return an id of nine letters and digits, because Mistral's templates refuse all other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class DeepSeekParser(JsonParser):
    """Parses calls between special tokens (DeepSeek-V3, V3.1, R1 and R1 distillations). V3.1 omits code fences."""

    BAR, LOW = "\uff5c", "\u2581"  # characters in the names of the tokens
    markers = (f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>", f"<{BAR}tool{LOW}call{LOW}begin{BAR}>")
    closers = ("```", f"<{BAR}tool{LOW}call{LOW}end{BAR}>", f"<{BAR}tool{LOW}calls{LOW}end{BAR}>")
    SEP = f"<{BAR}tool{LOW}sep{BAR}>"
    HEAD = re.compile(
        rf"(?:{markers[0]}\s*)?{markers[1]}"
        rf"(?:[^<{{]*{SEP}(?=[^<{{`]+```))?(?P<name>[^<{{`]+)(?:{SEP}|```(?:json)?)\s*(?=\{{)"
    )


class HarmonyToolParser(JsonParser):
    """Parses calls in the harmony format (reasoning/harmony.py): messages with a recipient.

    This parser is used if reasoning is not parsed. If reasoning is parsed, a HarmonyParser finds the calls by token
    ids.
    """

    markers = ("<|channel|>", "<|start|>")
    closers = ("<|call|>", "<|end|>", "<|return|>")
    HEADER = r"(?:(?!<\|message\|>).)*?"
    HEAD = re.compile(
        rf"<\|(?:channel|start)\|>(?={HEADER}\bto=(?:functions\.)?(?P<name>[^\s<]+)){HEADER}<\|message\|>\s*(?=\{{)",
        re.DOTALL,
    )


class Llama3Parser(JsonParser):
    """Parses `{"name": ..., "parameters": {...}}`, or several such objects separated by `;` (Llama 3.1 and later).

    The calls make up the whole answer, or follow the special token `<|python_tag|>`.
    """

    markers = ("<|python_tag|>",)
    HEAD = re.compile(r"(?P<tag><\|python_tag\|>)?[\s;,]*(?=[{\[])")
    BLANK = re.compile(r"[\s;,]*")

    def _takes_bare_call(self) -> bool:
        return self._space is not None

    def _may_lack_arguments(self, head: re.Match[str]) -> bool:
        return head["tag"] is not None  # without the tag, the object is more likely an answer in JSON


class WholeParser(ToolParser):
    """A parser for structured outputs. The whole answer must be JSON. If the answer was cut off, it becomes content.

    If `tool_choice` is "required", the answer is `[{"name": ..., "parameters": {...}}, ...]`. If `tool_choice` names a
    function, the answer contains only the arguments for the function `name`.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._name = name
        self._pieces: list[str] = []

    def feed(self, text: str, is_last: bool = False) -> list[Part]:
        self._pieces.append(text)
        if not is_last:
            return []
        text = "".join(self._pieces)
        value = parsed(text)
        if self._name is not None:
            return [ToolCall(self._name, text) if isinstance(value, dict) else text]
        return [*(_calls_of(value) if isinstance(value, list) else [])] or [text]


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": XmlParser,
    "seed_oss": SeedParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "openai": HarmonyToolParser,
    "none": ToolParser,
}
MAX_HEAD = 512  # the most characters from the beginning of a marker to the arguments of its call
# parser name -> a text that shows the format if the chat template contains it; the first match counts
SIGNS = {
    "openai": "<|channel|>commentary",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": DeepSeekParser.markers[0],
    "seed_oss": SeedParser.CALL,
    "qwen3_coder": "<function=",
    "hermes": "<tool_call>",
    "llama3_json": 'name, "parameters"',
}


def parser_for(chat_template: str) -> str | None:
    """Return the name of the parser for a chat template's tool calls, or `None` if the format is unknown."""
    return next((name for name, sign in SIGNS.items() if sign in chat_template), None)


# -- JSON as models write it -------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if (value := float(text)) in (float("inf"), -float("inf")):
        raise ValueError(f"{text} is too large a number")
    return value


# strings may contain unescaped line ends and tabs; NaN and infinity are refused
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)


def parsed(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


class JsonScanner:
    """Finds the end of a JSON object or list while the text arrives. The scanner reads each character once.

    The scanner detects some invalid JSON early, such as a word after a string. The function `parsed` detects the
    remaining errors.
    """

    _NEXT = re.compile(r"[ \t\r\n]*([\w.+-]+|[^ \t\r\n]?)")  # a word is a number, true, false or null
    _IN_STRING = re.compile(r'["\\]')

    def __init__(self, start: int):
        self._place = start
        self._depth = 0
        self._is_in_string = False
        self._last = "open"  # or "value" or "word"; determines what may come next

    def end(self, text: str) -> int | None:
        """Return the index where the JSON ends, or None if `text` does not contain the end.

        `text` must begin with the text of the previous call. Raises ValueError if `text` is not JSON.
        """
        while not self._is_in_string or self._passes_string(text):
            match: Any = self._NEXT.match(text, self._place)
            token, self._place = match[1], match.end()
            if not token:
                return None
            if token in ("}", "]"):
                self._depth, self._last = self._depth - 1, "value"
                if not self._depth:
                    return self._place
            elif token in (",", ":") and self._last != "open":
                self._last = "open"
            elif token in ("{", "[") and self._last == "open":
                self._depth += 1
            elif token == '"' and self._last == "open":
                self._is_in_string, self._last = True, "value"
            elif (token[0].isalnum() or token[0] in "+-._") and self._last != "value":
                self._last = "word"
            else:
                raise ValueError(f"not JSON: {token!r} after a {self._last}")
        return None

    def _passes_string(self, text: str) -> bool:
        """Skip to the end of the current string. Return False if `text` does not contain the end of the string."""
        while (match := self._IN_STRING.search(text, self._place)) is not None:
            if match[0] == "\\" and match.end() == len(text):
                self._place = match.start()
                return False
            self._place = match.end() + (match[0] == "\\")
            if match[0] == '"':
                self._is_in_string = False
                return True
        self._place = len(text)
        return False


def _calls_of(value: Any, may_lack: bool = True) -> list[ToolCall]:
    """Return the calls that a JSON value or a list of JSON values describes.

    may_lack: whether a call may omit its arguments.
    """
    calls = [_call_of(item, may_lack) for item in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call_of(value: Any, may_lack: bool) -> ToolCall | None:
    """Return the call that a JSON value describes, or None if the value is not a call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's clients write calls in this form
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    arguments = value.get(key) if key or may_lack else False
    if isinstance(arguments, str):  # some models write arguments as a string, as OpenAI's clients do
        arguments = parsed(arguments) if arguments.strip() else {}
    elif arguments is None:
        arguments = {}
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return the end of the match at `start`, or `start` if there is no match."""
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def length_before(tag: str, text: str, is_last: bool) -> int:
    """Return how many characters precede `tag` in `text`.

    An incomplete `tag` at the end of `text` is treated like `tag`, unless `is_last` is True.
    """
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
    """Return the text between two tags. A line break after the first tag or before the second tag is removed."""
    return text.removeprefix("\r\n" if text.startswith("\r\n") else "\n").removesuffix("\n").removesuffix("\r")


def _typed(text: str, schema: Any, key: str) -> Any:
    """Convert the text of a parameter to a type that the schema allows."""
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
    """Return the types that a schema allows, or an empty set if the schema names no type."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    types = schema.get("type")
    allowed = {types} if isinstance(types, str) else {name for name in types or () if isinstance(name, str)}
    if schema.get("nullable") is True:
        allowed.add("null")
    if isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
        allowed |= _types_of(referred(path, root), root, depth - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(name) or ():
            allowed |= _types_of(option, root, depth - 1)
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]:
        other = "null" if value is None else "string"
        allowed |= {name for name, kind in _TYPES.items() if isinstance(value, kind)} or {other}
    return allowed

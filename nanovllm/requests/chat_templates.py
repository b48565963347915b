"""Determines the forms in which a chat template reads messages, and converts conversations to these forms.

Clients send the content of a message as text, as a list of parts, or not at all. Clients send the arguments of tool
calls as text. The forms that a template supports can be found only in the source code of the template.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, nodes

from nanovllm.reasoning.formats import HARMONY
from nanovllm.requests.content_parts import IMAGE_PART, problem_with
from nanovllm.requests.request import Message
from nanovllm.utils.checks import check_choice

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})  # a template may name more
INSTRUCTIONS = "system", "developer"
EFFORTS = "low", "medium", "high"  # of reasoning, with which gpt-oss was trained
NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}  # for other names in OpenAI's API
OTHER_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names
REASONING = "reasoning_content", "reasoning", "thinking"  # names of a message's entry for reasoning
PART_FILTERS = {"map", "select", "selectattr", "reject", "rejectattr"}  # filters that iterate over items
TYPE_TESTS = {"string", "mapping", "sequence", "iterable"}
MAX_CHARACTERS = 2**17  # longer templates are not parsed, because clients can send templates
MAX_COPIES = 16  # the longest chain of variables through which an entry is copied
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers that does not matter here


class TemplateForms(NamedTuple):
    """Describes the forms in which a chat template reads messages.

    content_parts: whether the template iterates over parts of the content. If False, parts are joined into one text.
    content_text: whether the template accepts text as content. If False, text becomes a list with one part.
    arguments_text: whether the template needs the arguments of a tool call as text. If False, arguments become an
        object.
    roles: the names that the template compares with the role of a message.
    reasoning: the names of message entries from which the template reads the reasoning.
    is_harmony: whether the template is that of gpt-oss. It refuses a message that has reasoning, content and tool
        calls, so the content of such a message becomes reasoning. `harmony_messages` describes what else it needs.
    """

    content_parts: bool = False
    content_text: bool = True
    arguments_text: bool = False
    roles: frozenset[str] = frozenset()
    reasoning: frozenset[str] = frozenset()
    is_harmony: bool = False

    def messages(self, messages: list[Message]) -> list[Message]:
        """Convert messages to the forms that the template reads. Raises ValueError if a part is not text."""
        converted = [self.message(message) for message in messages]
        return harmony_messages(converted) if self.is_harmony else converted

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the template's arguments. Raises ValueError if `reasoning_effort` has a wrong value."""
        if not self.is_harmony:
            return dict(arguments)
        changed = dict(arguments)
        effort = changed.pop("reasoning_effort", None)
        if effort is not None:
            changed["reasoning_effort"] = effort = NEAREST_EFFORT.get(effort, effort)
            check_choice("reasoning_effort", effort, EFFORTS)
        return changed | {"tools": [_with_description(tool) for tool in changed.get("tools") or ()] or None}

    def message(self, message: Message) -> Message:
        """Convert a message to the forms that the template reads. Raises ValueError if a part is not text.

        Null entries are dropped, as in transformers 5. An empty list of tool calls is dropped too, because a template
        may treat any list as tool calls.
        """
        entries: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
        if isinstance(role := entries.get("role"), str) and role not in self.roles:
            entries["role"] = OTHER_ROLES.get(role, role)
        if not entries.get("tool_calls", True):
            del entries["tool_calls"]
        elif isinstance(calls := entries.get("tool_calls"), list):
            entries["tool_calls"] = [self._call(call) for call in calls]
        texts = (entries[name] for name in REASONING if isinstance(entries.get(name), str) and entries[name])
        if (reasoning := next(texts, None)) is not None:
            entries |= dict.fromkeys(self.reasoning - entries.keys(), reasoning)
        if "content" in entries:
            entries["content"] = self._content(entries["content"])
        is_full = self.is_harmony and "tool_calls" in entries and reasoning is not None
        if is_full and (text := entries.pop("content", "")):
            entries |= dict.fromkeys(self.reasoning, f"{reasoning}\n\n{text}")
        return entries

    def check_roles(self, messages: list[Message]) -> None:
        """Raise ValueError if the role of a message is neither in ROLES nor named by the template."""
        known = sorted(ROLES | self.roles)
        for message in messages:
            if message["role"] not in known:
                raise ValueError(f"messages: role {message['role']!r:.80}: must be one of {', '.join(known)}")

    def with_contents(self, messages: list[Message]) -> list[Message]:
        """Add empty content to answers and tool results without content, because some templates require content."""
        empty = {"content": "" if self.content_text else []}
        return [{**empty, **message} if message["role"] in ("assistant", "tool") else message for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, (list, tuple)):
            parts = [part if part is IMAGE_PART else _text_part(part) for part in content]
            if self.content_parts:
                return parts
            if IMAGE_PART in parts:
                raise ValueError("messages: the chat template does not read parts of content, so it takes no images")
            return "\n".join([part["text"] for part in parts])
        if self.content_text or not isinstance(content, str):
            return content
        return [{"type": "text", "text": content}] if content else []

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if self.arguments_text and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_text and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}", strict=False)
            except ValueError:
                return call
        else:
            return call
        return {**call, "function": {**function, "arguments": arguments}}


def harmony_messages(messages: list[Message]) -> list[Message]:
    """Make a conversation that the chat template of gpt-oss reads completely.

    The template reads instructions only from the first message, so all instructions are joined there. It reads only the
    first tool call of a message, and treats each result as that of the last call. A message with several calls
    therefore becomes several messages, each with the results of its call.
    """
    instructions = [message for message in messages if message["role"] in INSTRUCTIONS]
    if instructions and all(isinstance(message.get("content"), str) for message in instructions):
        first = instructions[0] | {"content": "\n\n".join(message["content"] for message in instructions)}
        messages = [first, *(message for message in messages if message["role"] not in INSTRUCTIONS)]
    made: list[Message] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2 or not all(isinstance(call, Mapping) for call in calls):
            made.append(message)
            continue
        results = [*takewhile(lambda later: later["role"] == "tool", messages[i + 1 :])]
        numbers = {call.get("id"): number for number, call in enumerate(calls)}
        owners = [numbers.get(x.get("tool_call_id"), min(n, len(calls) - 1)) for n, x in enumerate(results)]
        for number, call in enumerate(calls):
            rest = message if number == 0 else {"role": message["role"]}
            made += [rest | {"tool_calls": [call]}, *(x for x, owner in zip(results, owners) if owner == number)]
        return made + harmony_messages(messages[i + 1 + len(results) :])
    return made


def _with_description(tool: Any) -> Any:
    """Return a tool with a description, which may be empty, because the template of gpt-oss needs one."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _text_part(part: Any) -> dict[str, Any]:
    if (problem := problem_with(part)) is not None:
        raise ValueError(f"messages: {problem}")
    entry = {"type": "text", "text": part} if isinstance(part, str) else part
    if not isinstance(entry, Mapping) or entry.get("type") != "text" or not isinstance(entry.get("text"), str):
        raise ValueError(f"messages: content part {part!r:.80}: must be text, as {{'type': 'text', 'text': ...}}")
    return dict(entry)


@lru_cache(maxsize=64)
def forms_of(template: str) -> TemplateForms:
    """Return the forms that a chat template reads.

    If the template is very long or invalid, return the default forms.
    """
    if len(template) > MAX_CHARACTERS:
        return TemplateForms()
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
        return _forms_in(tree)._replace(is_harmony=HARMONY.begin in template)
    except (TemplateError, RecursionError):
        return TemplateForms()


def _forms_in(tree: nodes.Template) -> TemplateForms:
    content, arguments, role = (_Entry(name, tree) for name in ("content", "arguments", "role"))
    has_parts = content.is_split()
    read = {node.attr for node in tree.find_all(nodes.Getattr)} | {node.value for node in tree.find_all(nodes.Const)}
    return TemplateForms(
        content_parts=has_parts,
        content_text=not has_parts or bool(content.tests() & TYPE_TESTS),
        arguments_text=arguments.is_joined() and not arguments.tests() & TYPE_TESTS,
        roles=frozenset(role.compared()),
        reasoning=frozenset(read & {*REASONING}),
    )


class _Entry:
    """Finds where a template reads the entry `name` of a message or tool call, directly or through a variable.

    Scopes are ignored, so variables with the same name are treated as one variable.
    """

    def __init__(self, name: str, tree: nodes.Template):
        self._name, self._tree, self._variables = name, tree, set[str]()
        copies = [*self._copies()]
        for _ in range(MAX_COPIES):
            self._variables |= {target for target, source in copies if self._is(source)}

    def _copies(self) -> Iterator[tuple[str, nodes.Node]]:
        """Yield (variable, expression) for each `set` assignment and each argument passed to a macro."""
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name):
                yield assign.target.name, assign.node
        macros = {macro.name: [arg.name for arg in macro.args] for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            names = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
            yield from zip(names, call.args)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)

    def _is(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._variables
        if isinstance(node, nodes.Getattr):
            return node.attr == self._name
        if isinstance(node, nodes.Getitem):
            return _constant(node.arg) == self._name
        if isinstance(node, nodes.Call):  # message.get('content')
            is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and bool(node.args)
            return is_get and _constant(node.args[0]) == self._name
        if isinstance(node, nodes.CondExpr):
            return any(self._is(x) for x in (node.expr1, node.expr2) if x is not None)
        if isinstance(node, nodes.Or):
            return self._is(node.left)
        return isinstance(node, nodes.Filter) and node.name in ("default", "d") and self._is(node.node)

    def is_split(self) -> bool:
        filters = [node for node in self._tree.find_all(nodes.Filter) if node.name in PART_FILTERS]
        loops = [node.iter for node in self._tree.find_all(nodes.For)]
        return any(self._is(_unfiltered(node)) for node in (*filters, *loops))

    def is_joined(self) -> bool:
        sums = [(node.left, node.right) for node in self._tree.find_all(nodes.Add)]
        joined = [*sums, *(node.nodes for node in self._tree.find_all(nodes.Concat))]
        return any(self._is(node) for parts in joined for node in parts)

    def tests(self) -> set[str]:
        """Return the names of the Jinja tests that the template applies to the entry."""
        return {node.name for node in self._tree.find_all(nodes.Test) if self._is(node.node)}

    def compared(self) -> set[str]:
        comparisons = self._tree.find_all(nodes.Compare)
        operands = [[node.expr, *(operand.expr for operand in node.ops)] for node in comparisons]
        compared = [x for expressions in operands if any(map(self._is, expressions)) for x in expressions]
        constants = [x for node in compared for x in (node, *node.find_all(nodes.Const)) if isinstance(x, nodes.Const)]
        return {constant.value for constant in constants if isinstance(constant.value, str)}


def _constant(node: nodes.Node) -> Any:
    """Return the value of a constant expression. For any other expression, return an object that equals no string."""
    return node.value if isinstance(node, nodes.Const) else node


def _unfiltered(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node

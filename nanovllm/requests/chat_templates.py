"""What a chat template takes, which its program alone shows, and conversations in that form.

Clients send a content as text, as a list of parts or not at all, and arguments of calls as text. Templates differ in
what they can read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, nodes

from nanovllm.requests.request import Message

OTHER_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names
REASONING = "reasoning_content", "reasoning", "thinking"  # names of the same entry
OF_PARTS = {"map", "select", "selectattr", "reject", "rejectattr"}  # filters
OF_KIND = {"string", "mapping", "sequence", "iterable"}  # tests
MAX_CHARACTERS = 2**17  # of a template that is looked at: it may be a client's
MAX_COPIES = 16  # of an entry, each made from the last one
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers, which changes nothing here


class TemplateForms(NamedTuple):
    """The forms in which a chat template reads messages.

    content_parts: it goes through the parts of a content; else a list is joined to one text.
    content_text: a content may be text; else it is a list with one part.
    arguments_text: it adds the arguments of a call to other text; else they are an object.
    roles: that it compares a message's role with.
    reasoning: the names under which it reads the reasoning.
    """

    content_parts: bool = False
    content_text: bool = True
    arguments_text: bool = False
    roles: frozenset[str] = frozenset()
    reasoning: frozenset[str] = frozenset()

    def message(self, message: Message) -> Message:
        """A message in these forms. ValueError for parts that are not text.

        A null is no entry, as in transformers 5, and no list of calls either, which templates take for some.
        """
        found: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
        if isinstance(role := found.get("role"), str) and role not in self.roles:
            found["role"] = OTHER_ROLES.get(role, role)
        if not found.get("tool_calls", True):
            del found["tool_calls"]
        elif isinstance(calls := found.get("tool_calls"), list):
            found["tool_calls"] = [self._call(call) for call in calls]
        given = (found[name] for name in REASONING if isinstance(found.get(name), str) and found[name])
        if (reasoning := next(given, None)) is not None:
            found |= dict.fromkeys(self.reasoning - found.keys(), reasoning)
        if "content" in found:
            found["content"] = self._content(found["content"])
        return found

    def with_contents(self, messages: list[Message]) -> list[Message]:
        """For a template that can't do without a content: it is empty in answers and results that have none."""
        empty = {"content": "" if self.content_text else []}
        return [{**empty, **message} if message["role"] in ("assistant", "tool") else message for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, (list, tuple)):
            parts = [_text_part(part) for part in content]
            return parts if self.content_parts else "\n".join([part["text"] for part in parts])
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


def _text_part(part: Any) -> dict[str, Any]:
    found = {"type": "text", "text": part} if isinstance(part, str) else part
    if not isinstance(found, Mapping) or found.get("type") != "text" or not isinstance(found.get("text"), str):
        raise ValueError(f"messages: content part {part!r:.80}: must be text, as {{'type': 'text', 'text': ...}}")
    return dict(found)


@lru_cache(maxsize=64)
def forms_of(template: str) -> TemplateForms:
    """The forms that a chat template takes; the plainest if it is no program, which its use will say, or very long."""
    if len(template) > MAX_CHARACTERS:
        return TemplateForms()
    try:
        return _forms_in(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template)))
    except (TemplateError, RecursionError):
        return TemplateForms()


def _forms_in(tree: nodes.Template) -> TemplateForms:
    content, arguments, role = (_Entry(name, tree) for name in ("content", "arguments", "role"))
    has_parts = content.is_split()
    read = {node.attr for node in tree.find_all(nodes.Getattr)} | {node.value for node in tree.find_all(nodes.Const)}
    return TemplateForms(
        content_parts=has_parts,
        content_text=not has_parts or bool(content.tests() & OF_KIND),
        arguments_text=arguments.is_joined() and not arguments.tests() & OF_KIND,
        roles=frozenset(role.compared()),
        reasoning=frozenset(read & {*REASONING}),
    )


class _Entry:
    """Where a template reads an entry of this name, of any message or call, also from variables that it is copied to.

    Names of variables are taken for the same in the whole template.
    """

    def __init__(self, name: str, tree: nodes.Template):
        self._name, self._tree, self._variables = name, tree, set[str]()
        copies = [*self._copies()]
        for _ in range(MAX_COPIES):
            self._variables |= {target for target, source in copies if self._is(source)}

    def _copies(self) -> Iterator[tuple[str, nodes.Node]]:
        """Variables, and what is assigned to each: by `set`, or as the argument of a macro."""
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name):
                yield assign.target.name, assign.node
        macros = {macro.name: [arg.name for arg in macro.args] for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            names = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
            yield from zip(names, call.args)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)

    def _is(self, node: nodes.Node) -> bool:
        """Whether an expression is the entry, or may be."""
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
        """Whether the template goes through the items of the entry."""
        filters = [node for node in self._tree.find_all(nodes.Filter) if node.name in OF_PARTS]
        loops = [node.iter for node in self._tree.find_all(nodes.For)]
        return any(self._is(_unfiltered(node)) for node in (*filters, *loops))

    def is_joined(self) -> bool:
        """Whether the template adds the entry to other text."""
        sums = [(node.left, node.right) for node in self._tree.find_all(nodes.Add)]
        joined = [*sums, *(node.nodes for node in self._tree.find_all(nodes.Concat))]
        return any(self._is(node) for parts in joined for node in parts)

    def tests(self) -> set[str]:
        """The names of tests of the entry."""
        return {node.name for node in self._tree.find_all(nodes.Test) if self._is(node.node)}

    def compared(self) -> set[str]:
        """The texts that the entry is compared with."""
        comparisons = self._tree.find_all(nodes.Compare)
        sides = [[node.expr, *(operand.expr for operand in node.ops)] for node in comparisons]
        others = [side for both in sides if any(map(self._is, both)) for side in both]
        constants = [x for side in others for x in (side, *side.find_all(nodes.Const)) if isinstance(x, nodes.Const)]
        return {constant.value for constant in constants if isinstance(constant.value, str)}


def _constant(node: nodes.Node) -> Any:
    """The value of a constant; an object that equals nothing for any other expression."""
    return node.value if isinstance(node, nodes.Const) else node


def _unfiltered(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node

"""Command line flags from the fields of a dataclass, with the help that its docstring has for each."""

import argparse
import inspect
import json
import re
import types
from collections.abc import Container, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, Union, get_args, get_origin


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong. No flag can be shortened, as a later one could change what that means."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, allow_abbrev=False, **options)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Nothing may be left over; that of a command is the command's own error, and its help has the flags."""
        parsed, rest = super().parse_known_args(*arguments, **options)
        if rest:
            typed, flags = rest[0].partition("=")[0], [*self._option_string_actions]
            meant = [flag for flag in flags if flag.startswith(typed)][:3] or get_close_matches(typed, flags, n=1)
            hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type,
    title: str,
    skip: Container[str] = (),
    several: Container[str] = (),
) -> None:
    """A flag `--like-this` for each field, in a group. A flag that is not given leaves nothing in the namespace.

    Of the fields with several values, those in `several` take all that follow the flag; others have a flag for each.
    """
    group = parser.add_argument_group(title)
    help_texts = descriptions(settings)
    for field in fields(settings):
        if field.init and field.name not in skip:
            options = _options(field.type) | {"help": _help(help_texts.get(field.name, ""), field)}
            options |= {"nargs": "+"} if field.name in several else {}
            group.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, **options)


def given(arguments: argparse.Namespace, settings: type, skip: Container[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass for which there was a flag, without those in `skip`."""
    names = {field.name for field in fields(settings) if field.name not in skip}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    return {name: tuple(_items(value)) if isinstance(value, list) else value for name, value in values.items()}


def _items(values: list[str]) -> list[str]:
    """A value may be a JSON list of several."""
    return [item for value in values for item in (json.loads(value) if value.startswith('["') else [value])]


def descriptions(settings: type) -> dict[str, str]:
    """The text after `name: ` in a docstring, with its continuation lines, which are indented."""
    found: dict[str, str] = {}
    text = inspect.cleandoc(settings.__doc__ or "")  # Python 3.13 removes the indentation itself
    for names, lines in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n    .*)*)", text, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(lines.split()))
    return found


def _help(text: str, field: Field) -> str:
    default = field.default if field.default is not MISSING else None
    suffix = "" if default in (None, ()) else f" (default: {default})"
    repeated = "; may be given several times" if _options(field.type).get("action") == "extend" else ""
    return f"{text.removesuffix('.')}{repeated}{suffix}".replace("%", "%%").replace("`", "")


def _options(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type, of several the first of this order; a type that is a name is a text."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) in (tuple, Sequence) for kind in kinds):
        return {"action": "extend", "nargs": 1, "metavar": "VALUE"}
    for kind, metavar in ((int, "N"), (float, "X")):
        if kind in kinds:
            return {"type": kind, "metavar": metavar}
    return {"metavar": "VALUE"}

"""Makes command line flags from the fields of a dataclass. The help texts come from the dataclass's docstring."""

import argparse
import inspect
import json
import re
import textwrap
import types
from collections.abc import Container, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, Union, get_args, get_origin

from nanovllm.utils.checks import hint

# for flags whose last word does not name the value
METAVARS = {"stop": "TEXT", "uds": "PATH", "speculative_config": "JSON"}
METAVARS |= {"limit_mm_per_prompt": "JSON", "mm_processor_kwargs": "JSON", "allowed_media_domains": "HOST"}


class HelpFormatter(argparse.HelpFormatter):
    """Formats help texts. No line ends inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line.

    The parser accepts no abbreviated flags, because new flags could make abbreviations ambiguous.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, allow_abbrev=False, **options)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Let a subcommand's parser reject unknown arguments, so that the error refers to the subcommand's help."""
        parsed, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed, unknown

    def _hint(self, unknown: list[str]) -> str:
        typed, flags = unknown[0].partition("=")[0], [*self._option_string_actions]
        without_flag = {f"--{action.dest}" for action in self._actions if not action.option_strings}
        if typed in without_flag:
            return f" ({typed[2:].upper()} is given without a flag)"
        if "--prompt" in without_flag and not typed.startswith("-"):
            return " (a PROMPT of several words needs quotes)"
        meant = [x for x in flags if x.startswith(typed)][:3] or get_close_matches(typed, flags, n=1, cutoff=0.75)
        return f" (did you mean {' or '.join(meant)}?)" if meant else ""

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"[^ ,']+", choice[2])  # Python 3.12 and later write them without quotes
            message = message.replace(" (choose", f"{hint(choice[1], known)} (choose")
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type,
    title: str,
    skip: Container[str] = (),
    several: Container[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add a group of flags, one for each field, such as `--like-this`.

    The parsed namespace contains only flags that are used.

    several: fields whose flags take several values. All other flags take one value, and are repeated to pass several
        values.
    defaults: help texts for defaults that differ from the fields' defaults.
    """
    group = parser.add_argument_group(title)
    help_texts = descriptions(settings)
    flags = {field.name: _flag(field.name) for field in fields(settings) if field.init and field.name not in skip}
    for field in fields(settings):
        if field.name not in flags:
            continue
        options = _options(field) | ({"nargs": "+"} if field.name in several else {})
        text = _in_words_of_a_shell(help_texts.get(field.name, ""), flags)
        if options.get("action") == "extend":
            text += "; may be given several times"
        if default := (defaults or {}).get(field.name) or _default(field):
            text += f" (default: {default})"
        group.add_argument(flags[field.name], default=argparse.SUPPRESS, help=text.replace("%", "%%"), **options)


def given(arguments: argparse.Namespace, settings: type, skip: Container[str] = ()) -> dict[str, Any]:
    """Return a dict that maps field names to the values of used flags. The fields in `skip` are left out."""
    names = {field.name for field in fields(settings) if field.name not in skip}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    return {name: tuple(_items(value)) if isinstance(value, list) else value for name, value in values.items()}


def _items(values: list[str]) -> list[str]:
    return [item for value in values for item in (json.loads(value) if value.startswith('["') else [value])]


def descriptions(settings: type) -> dict[str, str]:
    """Return a dict that maps each field of a dataclass to its text in the docstring.

    A text is the rest of the line `name: ...`, and the indented lines after this line.
    """
    texts: dict[str, str] = {}
    doc = inspect.cleandoc(settings.__doc__ or "")  # Python 3.13 removes the indentation itself
    for names, lines in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n    .*)*)", doc, re.MULTILINE):
        texts |= dict.fromkeys(names.split(", "), " ".join(lines.split()))
    return texts


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(field: Field) -> str:
    """Return a field's default in the syntax of a shell. If the default is missing or empty, return ""."""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return "" if field.default is MISSING or field.default in (None, (), "") else str(field.default)


def _in_words_of_a_shell(text: str, flags: Mapping[str, str]) -> str:
    """Replace field names in a help text with flags. Remove the text that begins with " In Python"."""
    text = text.partition(" In Python")[0].removesuffix(".")
    return re.sub(r"`([^`]*)`", lambda name: flags.get(name[1], name[1]), text)


def _options(field: Field) -> dict[str, Any]:
    """Return argparse's options for a field.

    If the field's type is a union, the first test below that succeeds decides how a value is converted. If no test
    succeeds, the value stays text.
    """
    hint = field.type
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    metavar = METAVARS.get(field.name) or field.name.rpartition("_")[2].upper().removesuffix("S")
    if any(get_origin(kind) in (tuple, Sequence) for kind in kinds):
        return {"action": "extend", "nargs": 1, "metavar": metavar}
    for kind, letter in ((int, "N"), (float, "X")):
        if kind in kinds:
            return {"type": kind, "metavar": letter}
    return {"metavar": metavar}

"""`nanovllm completion SHELL` prints a script that lets a shell complete commands and flags."""

import argparse
from collections.abc import Callable, Mapping

BASH = """_nanovllm() {{
    local found=
    case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
        1\\ *) found="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _nanovllm nanovllm
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh runs bash's functions
FILES = {
    "bash": "~/.local/share/bash-completion/completions/nanovllm",
    "zsh": "a file that ~/.zshrc sources after compinit",
    "fish": "~/.config/fish/completions/nanovllm.fish",
}


Parsers = Mapping[str, argparse.ArgumentParser]  # by name of the command


def add_arguments(parser: argparse.ArgumentParser, make_parsers: Callable[[], Parsers]) -> None:
    text = f"the shell; write the script to {', '.join(f'{file} ({shell})' for shell, file in FILES.items())}"
    parser.add_argument("shell", choices=[*FILES], help=text)
    parser.set_defaults(run=lambda options: completion(options.shell, make_parsers()))


def completion(shell: str, parsers: Parsers) -> int:
    words = {name: " ".join(_words(parser)) for name, parser in parsers.items()}
    print(_fish(words) if shell == "fish" else ZSH * (shell == "zsh") + _bash(words), end="")
    return 0


def _bash(words: Mapping[str, str]) -> str:
    cases = "\n".join(f'        *\\ {name}) found="{each}" ;;' for name, each in words.items())
    return BASH.format(commands=" ".join([*words, "--help", "--version"]), cases=cases)


def _fish(words: Mapping[str, str]) -> str:
    """Return commands for fish. The first line completes command names.

    For each command, another line completes the words after the command.
    """
    lines = [f"complete -c nanovllm -n __fish_use_subcommand -a '{' '.join([*words, '--help', '--version'])}'\n"]
    lines += [f"complete -c nanovllm -n '__fish_seen_subcommand_from {name}' -a '{words[name]}'\n" for name in words]
    return "".join(lines)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return a command's flags, and the choices of its arguments.

    If the command takes a model, add the bundled model.
    """
    words = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    choices = [choice for action in parser._actions for choice in action.choices or () if not action.option_strings]
    takes_model = any(action.dest == "model" and not action.option_strings for action in parser._actions)
    return words + choices + ["tiny-qwen3"] * takes_model

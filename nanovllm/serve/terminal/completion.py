"""`nanovllm completion bash`: a script by which bash completes commands and flags."""

import argparse

BASH = """_nanovllm() {{
    local words
    case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
        1\\ *) words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _nanovllm nanovllm
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "write its output into ~/.local/share/bash-completion/completions/nanovllm"
    parser.add_argument("shell", choices=("bash",), help=text)
    parser.set_defaults(run=completion)


def completion(options: argparse.Namespace) -> int:
    from nanovllm.serve.cli import complete_parsers

    words = {name: " ".join(_words(parser)) for name, parser in complete_parsers().items()}
    cases = "\n".join(f'        *\\ {name}) words="{each}" ;;' for name, each in words.items())
    print(BASH.format(commands=" ".join([*words, "--help", "--version"]), cases=cases), end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Its flags, what it lets one choose from, and the model that is always there."""
    words = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    choices = [choice for action in parser._actions for choice in action.choices or () if not action.option_strings]
    takes_model = any(action.dest == "model" and not action.option_strings for action in parser._actions)
    return words + choices + ["tiny-qwen3"] * takes_model

"""Reads lines from a terminal or a pipe, and writes text."""

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

readline: Any = None
with suppress(ImportError):  # on systems without readline, lines can be read, but not edited
    import readline  # type: ignore[no-redef]

MAX_HISTORY = 1000  # lines that are kept from one run to the next
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), 127, *range(128, 160)])  # all except tab and newline


class LineReader:
    """Reads lines from standard input. On a terminal, users can edit, search and complete lines with readline."""

    def __init__(self, commands: Collection[str]):
        self.is_terminal = sys.stdin.isatty()
        self._edits = self.is_terminal and sys.stdout.isatty()
        self._commands = sorted(commands)
        self._history: Path | None = None
        if self._edits and readline is not None:
            readline.set_completer_delims(" \n")
            readline.set_completer(self._complete)
            uses_libedit = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if uses_libedit else "tab: complete")
            readline.set_history_length(MAX_HISTORY)
            state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
            self._history = Path(state, "nanovllm", "chat_history")
            with suppress(OSError):
                readline.read_history_file(self._history)

    def read(self) -> str:
        """Return the next line. If a line ends with a backslash, the following line continues it.

        Raises EOFError at the end of the input, and KeyboardInterrupt on Ctrl-C.
        """
        lines = [self._read_line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            with suppress(EOFError):
                lines.append(self._read_line("… "))
        # a terminal may send invalid UTF-8
        return "\n".join(lines).encode(errors="replace").decode()

    def _read_line(self, prompt: str) -> str:
        if self.is_terminal and not self._edits:
            print(prompt, end="", file=sys.stderr, flush=True)
        return input(prompt if self._edits else "")

    def _complete(self, text: str, index: int) -> str | None:
        found = [word for word in self._commands if word.startswith(text)] if readline.get_begidx() == 0 else []
        return found[index] if index < len(found) else None

    def close(self) -> None:
        if self._history is not None:
            with suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._history.touch(0o600)
                readline.write_history_file(self._history)


def write(text: str, file: TextIO, is_dim: bool = False) -> None:
    """Write text and flush. If the output is a terminal, remove control characters, and dim the text if `is_dim`."""
    if file.isatty():
        text = text.translate(CONTROLS)
        if is_dim and text and "NO_COLOR" not in os.environ:
            text = f"\033[2m{text}\033[0m"
    file.write(text)
    file.flush()

"""Runs a conversation in the terminal: reads commands and questions, and shows answers as they arrive."""

import base64
import json
import re
import shlex
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter, strftime
from typing import Any

from nanovllm.requests.request import Message
from nanovllm.serve.terminal.lines import LineReader, write
from nanovllm.serve.terminal.sources import Piece, Source
from nanovllm.utils.checks import hint

MIN_SECONDS = 0.01  # if all tokens arrive within this time, in one piece for example, their rate says nothing
IMAGE_KINDS = {"png": rb"\x89PNG", "jpeg": rb"\xff\xd8\xff", "webp": rb"RIFF....WEBP", "gif": rb"GIF8"}  # first bytes
COMMANDS = {
    "/help": "list the commands",
    "/clear": "forget the conversation, but keep the system prompt",
    "/system": "[TEXT]: set the system prompt, or show it; `/system -` removes it",
    "/image": "FILE: send an image with the next message; several times for several images",
    "/params": "[NAME=VALUE ...]: set sampling parameters, or show them; NAME= resets one",
    "/save": "[FILE]: write the conversation as JSON into a new file; /save! FILE overwrites one",
    "/exit": "end the chat; so does Ctrl-D, or Ctrl-C twice",
}


class Conversation:
    """A chat in the terminal. Answers go to standard output. All other text goes to standard error."""

    def __init__(self, source: Source, params: dict[str, Any], names: tuple[str, ...], system: str | None = None):
        """params: the sampling parameters that the user has given.
        names: the names of all sampling parameters that can be given.

        Raises ValueError or TypeError if a parameter is wrong.
        """
        source.check(params)
        self.source, self.params, self.names, self.system = source, params, names, system
        self.messages: list[Message] = []
        self.images: list[dict[str, Any]] = []  # the images of the next message

    def run(self) -> int:
        """Chat until the input ends. Return the exit status: 1 if a line of piped input has failed, else 0.

        Raises KeyboardInterrupt on the second Ctrl-C, or on the first one if the input is not a terminal.
        """
        reader = LineReader(COMMANDS)
        if reader.is_terminal:
            self._note(f"{self.source.description}. /help lists the commands.")
        try:
            return self._run(reader)
        finally:
            reader.close()

    def _run(self, reader: LineReader) -> int:
        num_errors, was_interrupted = 0, False
        while True:
            try:
                line = reader.read()
                was_interrupted = False
                if line.startswith("/"):
                    self._command(*line.partition(" ")[::2])
                elif line.strip():
                    self._answer(line)
            except EOFError:  # at the end of the input, or from /exit
                return int(num_errors > 0 and not reader.is_terminal)
            except KeyboardInterrupt:
                if was_interrupted or not reader.is_terminal:
                    raise
                was_interrupted = True
                self._note("\nCtrl-C again ends the chat.")
            except (ValueError, TypeError, OSError, RuntimeError) as error:
                num_errors += 1
                self._note(f"Error: {_problem(error)}")

    def _note(self, text: str) -> None:
        write(text + "\n", sys.stderr, is_dim=True)

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        match name:
            case "/help":
                self._note("\n".join(f"{command:8} {text}" for command, text in COMMANDS.items()))
                self._note("A \\ at the end of a line continues the message in the next line. Ctrl-C stops an answer.")
            case "/clear":
                self.messages.clear()
                self.images.clear()
            case "/image":
                if not argument:
                    raise ValueError("/image: must be followed by a file, as in `/image picture.png`")
                image = _image_part(Path(argument).expanduser())
                self.source.check_image(image)
                self.images.append(image)
                self._note(f"{len(self.images)} image{'s' * (len(self.images) > 1)} for the next message")
            case "/system":
                if argument:
                    self.system = None if argument == "-" else argument
                self._note(f"system prompt: {self.system or 'none'}")
            case "/params":
                if argument:
                    self._set_params(argument)
                values = self.source.all_params(self.params).items()
                texts = [f"{name}={json.dumps(value)}" for name, value in values if name in self.names]
                self._note(" ".join(texts) or "the server's defaults")
            case "/save" | "/save!":
                file = Path(argument or strftime("chat-%Y%m%d-%H%M%S.json")).expanduser()
                content = {"model": self.source.name, "params": self.params, "messages": self._prompt(self.messages)}
                try:
                    with file.open("w" if name == "/save!" else "x", encoding="utf-8") as stream:
                        json.dump(content, stream, indent=1, ensure_ascii=False)
                except FileExistsError:
                    raise ValueError(f"{file} exists already; /save! {file} overwrites it") from None
                self._note(f"saved to {file}")
            case "/exit" | "/quit":
                raise EOFError
            case _:
                raise ValueError(f"{name}: no such command; /help lists them. A space before the / makes it a message")

    def _set_params(self, argument: str) -> None:
        params = self.params.copy()
        for setting in shlex.split(argument):
            name, separator, value = setting.partition("=")
            if name not in self.names or not separator:
                meant = "" if name in self.names else hint(name, self.names)
                known = ", ".join(self.names)
                raise ValueError(f"{setting}{meant}: must be NAME=VALUE, where NAME is one of {known}")
            if value:
                params[name] = _value(value)
            else:
                params.pop(name, None)
        self.source.check(params)
        self.params = params

    # -- answers -------------------------------------------------------------------------------------------------------

    def _prompt(self, messages: list[Message]) -> list[Message]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]

    def _answer(self, question: str) -> None:
        """Print the answer.

        If any token has arrived, the question and the answer become part of the conversation, even if Ctrl-C ended the
        answer.
        """
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        asked, answer = {"role": "user", "content": content}, Answer()
        messages = [*self.messages, asked]
        try:
            with closing(self.source.stream(self._prompt(messages), self.params)) as pieces:
                for piece in pieces:
                    answer.add(piece)
        except KeyboardInterrupt:
            answer.finish_reason = "Ctrl-C"
            raise
        finally:
            self.images = []
            if answer.num_tokens:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                answer.close()


class Answer:
    """Shows the pieces of an answer, and measures how fast they arrive."""

    def __init__(self) -> None:
        self.text, self.num_tokens = "", 0
        self.finish_reason: str | None = None
        self._shows_reasoning = False
        self._start = self._first = self._last = perf_counter()

    def add(self, piece: Piece) -> None:
        self._last = perf_counter()
        if not self.num_tokens:
            self._first = self._last
        self.num_tokens, self.finish_reason = piece.num_tokens, piece.finish_reason
        if piece.reasoning:
            write(piece.reasoning, sys.stderr, is_dim=True)
            self._shows_reasoning = True
        if piece.text and self._shows_reasoning:
            write("\n\n", sys.stderr)
            self._shows_reasoning = False
        self.text += piece.text
        write(piece.text, sys.stdout)

    def close(self) -> None:
        write("" if self.text.endswith("\n") else "\n", sys.stdout)
        write(self.summary() + "\n", sys.stderr, is_dim=True)

    def summary(self) -> str:
        """Return a text with the number of tokens, the tokens per second, and the finish reason."""
        parts = [f"{self.num_tokens} tokens" if self.num_tokens > 1 else "1 token"]
        if self.num_tokens > 1 and self._last - self._first > MIN_SECONDS:
            parts.append(f"{(self.num_tokens - 1) / (self._last - self._first):.1f} tokens/s")
        parts.append(f"first token after {self._first - self._start:.2f} s")
        if not self.text.strip():
            parts.append("no text")
        parts.append(f"finish reason: {self.finish_reason or 'error'}")
        return f"[{', '.join(parts)}]"


def _problem(error: Exception) -> str:
    """Return the message of an error. If a file caused the error, the message contains its name, but no errno."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _image_part(file: Path) -> dict[str, Any]:
    """Return an image as a part of a message. Raises OSError or ValueError if the file can't be read."""
    data = file.read_bytes()
    kind = next((kind for kind, start in IMAGE_KINDS.items() if re.match(start, data, re.DOTALL)), None)
    if kind is None:
        raise ValueError(f"{file}: must be a PNG, JPEG, WebP or GIF file")
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

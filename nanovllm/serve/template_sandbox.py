"""Renders chat templates in separate processes if rendering may be slow.

A template is a program, and jinja2's sandbox limits neither the time nor the memory of a template. An expression such
as `'a' * 10**10` or a huge width in a format can take all memory. A few nested loops can take hours. A process can be
killed, but a thread can't.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from nanovllm.requests.prompts import render_chat
from nanovllm.requests.request import Message

MAX_PROCESSES = 4
# CPU time per conversation, which does not depend on other work; the wall-clock limit is twice that
MAX_SECONDS = 2.0
MAX_MEMORY = 2**29  # bytes of address space, in addition to the space of the program itself
MAX_CHARACTERS = 2**24  # of the rendered text
MANY_MESSAGES = 1000  # a template may loop over all messages for each message
MAX_PLAIN_CHARACTERS = 1024  # a longer argument may make a template slow
# This program reads settings and then conversations as lines of JSON, and writes the text or error of each
# conversation. The stand-in for a tokenizer has only the attributes that `apply_chat_template` needs.
PROGRAM = """
import json, resource, signal, sys
from types import SimpleNamespace

seconds, memory, max_characters, sys.path[:] = json.loads(sys.stdin.readline())
signal.signal(signal.SIGINT, signal.SIG_IGN)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

try:
    with open("/proc/self/statm") as own:
        memory += int(own.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (OSError, ValueError):
    pass  # of this system, only the time is bounded
print("ready", flush=True)
for line in sys.stdin:
    template, special_tokens, messages, arguments = json.loads(line)
    tokenizer = SimpleNamespace(special_tokens_map=special_tokens, get_chat_template=lambda *names, **more: template)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, as does SIGALRM
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    try:
        answer = [PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, **arguments), None]
        if len(answer[0]) > max_characters:
            answer = [None, f"it makes {len(answer[0])} characters; must be at most {max_characters}"]
    except MemoryError:
        answer = [None, "it takes too much memory"]
    except Exception as error:
        answer = [None, str(error)[:1000]]
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(answer), flush=True)
"""
Process = subprocess.Popen[bytes]


def may_take_long(body: Any, own_template: Any) -> bool:
    """Return whether rendering a conversation (a protocol.ChatFields) may be slow.

    Rendering may be slow if the client sends a template. The server's template may be slow if it could loop over many
    messages, or over arguments other than bools and short texts. An argument that is a number can't make rendering slow
    if the template does not contain the argument's name.
    """
    unused = lambda name, x: isinstance(x, (int, float)) and name not in str(own_template)
    arguments = (body.chat_template_kwargs or {}).items()
    is_plain = all(x is None or isinstance(x, bool) or _is_short_text(x) or unused(name, x) for name, x in arguments)
    return body.chat_template not in (None, own_template) or not is_plain or len(body.messages) > MANY_MESSAGES


def _is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_PLAIN_CHARACTERS


class TemplateSandbox:
    """Runs the processes that render templates, from the first use until `close`. Any thread may use the sandbox."""

    def __init__(self, tokenizer: Any):
        """tokenizer: its chat template is the default."""
        self._tokenizer = tokenizer
        self._processes: set[Process] = set()
        self._idle: list[Process] = []
        self._is_closed = False

    def close(self) -> None:
        """End the processes. Threads that wait for a process get an error."""
        self._is_closed = True  # before `_processes` is read, because `_start` adds a process before it reads this
        for process in [*self._processes]:
            process.kill()
            process.wait()

    def render(self, messages: list[Message], template_arguments: Mapping[str, Any]) -> str:
        """Call `render_chat` in a separate process.

        Raises ValueError if the call exceeds a limit, and RuntimeError after `close`.
        """
        process = self._take()
        try:
            return render_chat(_Renderer(process, self._tokenizer), messages, template_arguments)
        finally:
            if process.poll() is None and not self._is_closed:
                self._idle.append(process)
            else:
                self._end(process)

    def _take(self) -> Process:
        with suppress(IndexError):  # if another thread takes the last process
            while self._idle:
                if (process := self._idle.pop()).poll() is None:
                    return process
                self._end(process)
        return self._start()

    def _start(self) -> Process:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._processes.add(process)
        is_ready = _ask(process, json.dumps([MAX_SECONDS, MAX_MEMORY, MAX_CHARACTERS, sys.path]))
        if not is_ready or self._is_closed:
            self._end(process)
            problem = "was closed" if self._is_closed else f"has not started (exit status {process.returncode})"
            raise RuntimeError(f"the process that renders chat templates {problem}")
        return process

    def _end(self, process: Process) -> None:
        self._processes.discard(process)
        process.kill()
        with suppress(BrokenPipeError, ValueError):  # a line that was not sent, or closed pipes
            process.communicate()  # closes the pipes, and waits for the end


class _Renderer(NamedTuple):
    process: Process
    tokenizer: Any

    def get_chat_template(self, chat_template: str | None, tools: Any) -> str:
        return self.tokenizer.get_chat_template(chat_template, tools)

    def apply_chat_template(self, messages: list[Message], **arguments: Any) -> str:
        template = self.get_chat_template(arguments.pop("chat_template", None), arguments.get("tools"))
        question = [template, self.tokenizer.special_tokens_map, messages, arguments]
        answer = _ask(self.process, json.dumps(question, default=str))
        if not answer:
            raise ValueError(f"it takes more than {MAX_SECONDS:g} s, or too much memory")
        text, error = json.loads(answer)
        if error is not None:
            raise ValueError(error)
        return text


def _ask(process: Process, question: str) -> bytes:
    """Return a process's answer. If the process has ended, return b"". If the wait is interrupted, kill the process."""
    assert process.stdin is not None and process.stdout is not None
    answer = b""
    try:
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        pass
    finally:
        if not answer.endswith(b"\n"):
            process.kill()
            process.wait()
    return answer if process.returncode is None else b""

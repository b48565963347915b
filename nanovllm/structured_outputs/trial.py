"""Finds out in a process of its own whether a grammar can be compiled.

llguidance bounds the time of each mask, but not the time to compile an intersection: a few patterns in one `allOf`, a
large `multipleOf`, or `&` and `~` of a Lark grammar take minutes. A thread that compiles can't be ended; a process can.
"""

import json
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

MAX_SECONDS = 5.0
MAX_MEMORY = 2**32  # bytes of the process's address space
# reads grammars and writes their errors, as lines of JSON; the tokens are the 256 bytes
PROGRAM = """
import json, resource, signal, sys

seconds, memory, *sys.path[:] = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
signal.signal(signal.SIGINT, signal.SIG_IGN)
from llguidance import LLMatcher, LLTokenizer

class Bytes:
    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]
    __call__ = list

tokenizer = LLTokenizer(Bytes())
for line in sys.stdin:
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process
    error = LLMatcher(tokenizer, json.loads(line), log_level=0).get_error()
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(error), flush=True)
"""


class TrialProcess:
    """The process, which starts with the first grammar and ends with `close` or this object. Any thread may call it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """End the process. It never waits for `error_of`, which a signal handler may have interrupted."""
        self._is_closed = True  # before `_process` is read: `error_of` reads them in the other order
        if (process := self._process) is None:
            return
        process.kill()
        if self._lock.acquire(blocking=False):  # otherwise `error_of` is waiting for an answer, and does the rest
            try:
                _end(process)
            finally:
                self._lock.release()

    def error_of(self, grammar: str) -> str:
        """Why a grammar can't be compiled; empty if it can. RuntimeError after `close`."""
        with self._lock:
            process = self._process
            if not self._is_closed and (process is None or process.poll() is not None):
                self._process = process = self._start()
            if process is None or self._is_closed:
                if process is not None:
                    _end(process)
                raise RuntimeError("this engine was closed by exit()")
            try:
                answer = _ask(process, json.dumps(grammar))
            except BaseException:  # this answer would be taken for that to the next grammar
                _end(process)
                raise
        if not answer and self._is_closed:
            raise RuntimeError("this engine was closed by exit()")
        return json.loads(answer) if answer else f"takes more than {MAX_SECONDS:g} s, or too much memory, to compile"

    def _start(self) -> subprocess.Popen[bytes]:
        settings = json.dumps([MAX_SECONDS, MAX_MEMORY, *sys.path])
        command, pipe = [sys.executable, "-c", PROGRAM, settings], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, process)
        return process


def _ask(process: subprocess.Popen[bytes], line: str) -> bytes:
    """The answer; empty if the process has ended instead."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        if answer := process.stdout.readline():
            return answer
    _end(process)
    return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError, ValueError):  # a line that was not sent; pipes that are closed already
        process.communicate()  # closes the pipes, and waits

"""Compiles grammars in separate processes, to check whether they compile.

llguidance limits the time for each mask, but not the time to compile an intersection of grammars. Compilation can take
minutes for a few patterns in one `allOf`, a large `multipleOf`, or `&` and `~` in a Lark grammar. A process can be
killed while it compiles, but a thread can't.
"""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b

MAX_PROCESSES = 4
MAX_SECONDS = 5.0  # CPU time per grammar, which does not depend on other work; the wall-clock limit is twice that
MAX_MEMORY = 2**32  # bytes of a process's address space
MAX_RESULTS = 1024
MAX_ERROR_CHARACTERS = 1000
# This program reads settings and then grammars as lines of JSON, and writes the error of each grammar. To save time,
# only the model's special tokens and the tokens of the 256 bytes have texts, which is enough to compile a grammar.
PROGRAM = """
import json, resource, signal, sys

seconds, memory, vocab_size, special_tokens, sys.path[:] = json.loads(sys.stdin.readline())
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
signal.signal(signal.SIGINT, signal.SIG_IGN)
from llguidance import LLMatcher, LLTokenizer

texts = {token_id: name.encode() for token_id, name in special_tokens}
free_ids = [i for i in range(256 + len(texts)) if i not in texts]
texts |= {token_id: bytes([byte]) for byte, token_id in enumerate(free_ids[:256])}
end = max(vocab_size, max(texts) + 1)

class Vocabulary:
    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = end, None
    special_token_ids = [end, *(token_id for token_id, _ in special_tokens)]
    tokens = [*(texts.get(i, b"") for i in range(end)), b"<end>"]
    __call__ = list

tokenizer = LLTokenizer(Vocabulary())
for line in sys.stdin:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, as does SIGALRM
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    error = LLMatcher(tokenizer, json.loads(line), log_level=0).get_error()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(error), flush=True)
"""
Process = subprocess.Popen[bytes]


class CompileSandbox:
    """Compiles grammars in at most `MAX_PROCESSES` processes.

    The processes start on demand, and end when `close` is called or this object is garbage-collected. All methods are
    thread-safe. If several threads ask for the same grammar at the same time, the grammar is compiled once. The results
    of the `MAX_RESULTS` most recently used grammars are kept.
    """

    def __init__(self, vocab_size: int, special_tokens: dict[int, str]):
        """`special_tokens` maps ids to names. Grammars may use the special tokens, and ids below `vocab_size`."""
        self._vocabulary = [vocab_size, [*special_tokens.items()]]
        self._processes: set[Process] = set()
        self._in_trial: dict[bytes, Process] = {}  # by hash of the grammar
        self._errors: OrderedDict[bytes, str] = OrderedDict()  # by hash of the grammar; the most recently used is last
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may call `close` at any time
        self._is_closed = False
        self._pid = os.getpid()
        weakref.finalize(self, _end_all, self._processes, self._pid)

    def close(self) -> None:
        """End the processes.

        In a forked child process, this method does nothing, because the child does not own the processes. `close` does
        not wait for `error_of`, because a signal handler may call `close` during `error_of`.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True  # before `_processes` is read, because `error_of` adds a process before it reads this
        with self._changed:
            for process in [*self._processes]:
                process.kill()  # a thread that waits for the process's answer cleans up
            _end_all(self._processes.difference(self._in_trial.values()), self._pid)
            self._changed.notify_all()

    def error_of(self, grammar: str) -> str:
        """Return the reason why a grammar can't be compiled, or "". Raises RuntimeError after `close`."""
        key, process = blake2b(grammar.encode(), digest_size=16).digest(), None
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_turn(key))
                if not self._is_closed and key in self._errors:
                    self._errors.move_to_end(key)
                    return self._errors[key]
                if not self._is_closed:
                    process = self._in_trial[key] = self._idle_process()
            answer = b"" if self._is_closed or process is None else _ask(process, grammar)
            if not answer and self._is_closed:
                raise RuntimeError("this engine was closed by exit()")
            error = (
                json.loads(answer) if answer else f"takes more than {MAX_SECONDS:g} s, or too much memory, to compile"
            )
            with self._changed:
                self._errors[key] = error = error[:MAX_ERROR_CHARACTERS]
                while len(self._errors) > MAX_RESULTS:
                    self._errors.popitem(last=False)
            return error
        except BaseException:  # end the process, because its late answer would count as the next grammar's answer
            if process is not None:
                _end(process)
            raise
        finally:
            with self._changed:
                if process is not None:
                    self._in_trial.pop(key, None)
                    if self._is_closed:
                        _end(process)
                self._changed.notify_all()

    def _has_turn(self, key: bytes) -> bool:
        """Return True if the grammar's result is known, or if a process can compile the grammar now."""
        return key in self._errors or (key not in self._in_trial and len(self._in_trial) < MAX_PROCESSES)

    def _idle_process(self) -> Process:
        for process in self._processes.difference(self._in_trial.values()):
            if process.poll() is None:
                return process
            _end(process)
            self._processes.discard(process)
        return self._start()

    def _start(self) -> Process:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._processes.add(process)
        _send(process, [MAX_SECONDS, MAX_MEMORY, *self._vocabulary, sys.path])
        return process


def _send(process: Process, message: object) -> None:
    """Send a line of JSON, unless the process has ended."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _ask(process: Process, grammar: str) -> bytes:
    """Send a grammar, and return the process's answer. If the process has ended, return b""."""
    assert process.stdout is not None
    _send(process, grammar)
    if not (answer := process.stdout.readline()):
        _end(process)
    return answer


def _end(process: Process) -> None:
    process.kill()
    with suppress(BrokenPipeError, ValueError):  # a line that was not sent, or closed pipes
        process.communicate()  # closes the pipes, and waits for the end


def _end_all(processes: set[Process], pid: int) -> None:
    for process in [*processes] if os.getpid() == pid else ():
        _end(process)

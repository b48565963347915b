"""Finds out in a process of its own whether a grammar can be compiled.

llguidance bounds the time of each mask, but not the time to compile an intersection: a few patterns in one `allOf`, a
large `multipleOf`, or `&` and `~` of a Lark grammar take minutes. A thread that compiles can't be ended; a process can.
"""

import json
import subprocess
import sys
import threading
import weakref

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
    """The process, which starts with the first grammar and ends with this object. Any thread may call it."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def error_of(self, grammar: str) -> str:
        """Why a grammar can't be compiled; empty if it can."""
        with self._lock:
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(json.dumps(grammar).encode() + b"\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # its answer would be taken for that to the next grammar
                self._end()
                raise
            if not answer:
                self._end()
        return json.loads(answer) if answer else f"takes more than {MAX_SECONDS:g} s, or too much memory, to compile"

    def _start(self) -> None:
        settings = json.dumps([MAX_SECONDS, MAX_MEMORY, *sys.path])
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM, settings], **pipes)
        self._end_process = weakref.finalize(self, _end, self._process)

    def _end(self) -> None:
        self._end_process()
        self._process = None


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()  # closes the pipes, and waits

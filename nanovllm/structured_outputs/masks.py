"""Threads for the masks that take too long for a step, so that they hold up no other request."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from time import thread_time
from typing import Any

from nanovllm.structured_outputs.grammar import Grammar
from nanovllm.utils.cores import available_cores

TURN_SECONDS = 0.005  # of processor time, after which other requests come next


@cache
def num_cores() -> int:
    """Those that masks may use: some are left to the engine."""
    return max(1, available_cores() * 4 // 5)


class MaskThreads:
    """Those of an engine. Grammars whose masks are slow have threads that make no others."""

    def __init__(self) -> None:
        self._fast, self._slow = (ThreadPoolExecutor(max(1, num_cores() // n), "nanovllm-masks") for n in (2, 4))
        self._pid = os.getpid()

    def submit(self, work: Callable[[], object], is_slow: bool) -> None:
        (self._slow if is_slow else self._fast).submit(work)

    def close(self) -> None:
        """Wait for the masks that are being made, and make no more. In a forked child nothing happens."""
        if os.getpid() == self._pid:
            for pool in (self._fast, self._slow):
                pool.shutdown(cancel_futures=True)


class MaskQueue:
    """The masks that one request needs. Requests take turns, each for at least one mask."""

    def __init__(self, threads: MaskThreads, grammar: Grammar):
        self._threads, self._grammar = threads, grammar
        self._jobs: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._has_turn, self._lock = False, Lock()

    def submit(self, make: Callable[[], Any]) -> Future:
        """Make a mask when the earlier ones are made; until then the Future can be cancelled."""
        future: Future = Future()
        with self._lock:
            self._jobs.append((future, make))
            has_turn, self._has_turn = self._has_turn, True
        if not has_turn:
            self._threads.submit(self._take_turn, self._grammar.is_slow)
        return future

    def _take_turn(self) -> None:
        begin = thread_time()
        while True:
            with self._lock:
                self._has_turn = bool(self._jobs)
                if not self._jobs:
                    return
                if thread_time() - begin > TURN_SECONDS:
                    break
                future, make = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(make())
                except BaseException as error:
                    future.set_exception(error)
        self._threads.submit(self._take_turn, self._grammar.is_slow)

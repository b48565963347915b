"""Computes masks in background threads, so that slow masks do not delay other requests."""

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

TURN_SECONDS = 0.005  # CPU time after which a request lets the next request compute masks


@cache
def num_cores() -> int:
    """Return how many CPU cores may compute masks. The engine needs the remaining cores."""
    return max(1, available_cores() * 4 // 5)


class MaskThreads:
    """The threads that compute masks for an engine. Slow masks have separate threads."""

    def __init__(self) -> None:
        self._fast, self._slow = (ThreadPoolExecutor(max(1, num_cores() // n), "nanovllm-masks") for n in (2, 4))
        self._pid = os.getpid()

    def submit(self, work: Callable[[], object], is_slow: bool) -> None:
        (self._slow if is_slow else self._fast).submit(work)

    def close(self) -> None:
        """Wait for the masks in progress, and start no further masks.

        In a forked child process, this method does nothing.
        """
        if os.getpid() == self._pid:
            for pool in (self._fast, self._slow):
                pool.shutdown(cancel_futures=True)


class MaskQueue:
    """A queue of the masks that one request needs. Requests take turns. In each turn, at least one mask is computed."""

    def __init__(self, threads: MaskThreads, grammar: Grammar):
        self._threads, self._grammar = threads, grammar
        self._jobs: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._has_turn, self._lock = False, Lock()

    def submit(self, make: Callable[[], Any]) -> Future:
        """Add a mask to the queue. `make`, which computes the mask, is called after all earlier masks of the request.

        The returned `Future` can be cancelled before `make` is called.
        """
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

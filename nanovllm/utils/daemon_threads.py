"""A pool of daemon threads."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any


class DaemonThreads:
    """Works like ThreadPoolExecutor, but Python does not wait for the threads when it exits.

    The threads continue to work while Python exits.
    """

    def __init__(self, name: str, count: int):
        self._work: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        self._work.put((future, partial(function, *arguments)))
        return future

    def close(self, seconds: float = 0.0) -> None:
        """End the threads when all submitted work is done. Wait for the end for at most `seconds`.

        If a thread frees a tensor while Python exits, the process may abort.
        """
        for _ in self._threads:
            self._work.put(None)
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

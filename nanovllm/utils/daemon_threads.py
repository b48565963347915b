"""A pool of daemon threads."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
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

    def close(self) -> None:
        """End the threads when all submitted work is done."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

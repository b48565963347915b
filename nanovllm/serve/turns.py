"""Makes waiting fair. The slow requests of one client wait for each other, but do not delay other clients."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from time import perf_counter
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
CLIENT: ContextVar[Hashable] = ContextVar("client", default=None)  # the client whose request this task handles


class ClientTurns:
    """Runs at most `num_turns` calls of each client at a time. Only the event loop's thread may use this object."""

    def __init__(self, num_turns: int):
        self._num_turns = num_turns
        self._turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()  # only semaphores in use

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Wait until fewer than `num_turns` calls of the client run, then run `call`.

        If the client disconnects, `call` continues, and still counts as a running call.
        """
        turn = self._turns.setdefault(CLIENT.get(), asyncio.Semaphore(self._num_turns))
        await turn.acquire()
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(task)


class LoopTurns:
    """Admits a few tasks in each iteration of the event loop, in order of arrival.

    An iteration admits as many tasks as fit into half the duration of the previous iteration, but at least `least`
    tasks and at most `most`. The estimated duration of a task is `seconds`. With a fixed number, tasks would wait too
    long when other work makes iterations long.
    """

    def __init__(self, least: int, most: int = 0, seconds: float = 1.0):
        self._least, self._most, self._seconds = least, max(least, most), seconds
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_left = least  # tasks that this iteration may still admit
        self._begin: float | None = None  # the start of this iteration, if `_next_turn` will be called at its end

    async def next(self) -> None:
        """Wait until this object admits the current task."""
        loop = asyncio.get_running_loop()
        if self._begin is None:
            self._begin = perf_counter()
            loop.call_soon(self._next_turn)
        if self._num_left > 0 and not self._waiting:
            self._num_left -= 1
            return
        self._waiting.append(turn := loop.create_future())
        await turn

    def _next_turn(self) -> None:
        assert self._begin is not None
        now = perf_counter()
        num_fitting, self._begin = int((now - self._begin) / (2 * self._seconds)), None
        self._num_left = min(self._most, max(self._least, num_fitting))
        while self._num_left > 0 and self._waiting:
            if not (turn := self._waiting.popleft()).done():  # skip cancelled tasks
                turn.set_result(None)
                self._num_left -= 1
        if self._waiting or self._num_left < self._least:
            self._begin = now
            asyncio.get_running_loop().call_soon(self._next_turn)

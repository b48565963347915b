"""Who may use what takes long: a client with many slow requests waits for its own, and not the others for them."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
CLIENT: ContextVar[Hashable] = ContextVar("client", default=None)  # that has sent the request of this task


class ClientTurns:
    """At most `num_turns` calls at a time for each client. For the event loop's thread only."""

    def __init__(self, num_turns: int):
        self._num_turns = num_turns
        self._turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()  # those in use

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`. It keeps its turn until it has ended, as a thread goes on if its client has gone."""
        turn = self._turns.setdefault(CLIENT.get(), asyncio.Semaphore(self._num_turns))
        await turn.acquire()
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(task)


class LoopTurns(asyncio.Semaphore):
    """Lets at most `value` tasks go on in each turn of the event loop, in the order in which they come."""

    async def next(self) -> None:
        """Wait until it is this task's turn."""
        await self.acquire()
        asyncio.get_running_loop().call_soon(self.release)

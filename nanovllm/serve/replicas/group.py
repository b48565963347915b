"""N replicas for one event loop: which of them computes what, and what happens when one is lost."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.replicas.messages import NewRequest, decode_report, encode_requests
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.routing import PrefixRouter, Router

logger = logging.getLogger("nanovllm")
MAX_FAILURES = 3  # in a row, of a replica or while a request is computed; see ReplicaGroup
RESTART_SECONDS = 2.0  # before a replica is started again that was lost several times in a row


class Handle(Protocol):
    """A replica in another process. Any method may raise if it was lost."""

    async def start(self) -> dict[str, Any]: ...
    def reports(self) -> AsyncIterator[bytes]: ...
    def call(self, method: str, *arguments: Any) -> Any: ...
    def kill(self) -> None: ...


class Slot:
    """One of the N replicas. Its process changes when it is started again."""

    def __init__(self, index: int):
        self.index = index
        self.handle: Handle | None = None
        self.is_ready = False  # it takes requests
        self.facts: dict[str, Any] = {}  # that its start returned
        self.requests: dict[int, ReplicaRequest] = {}  # that it has not ended, by number
        self.num_answers = 0  # of those requests
        self.to_send: list[NewRequest] = []
        self.num_failures = 0  # since its last answer
        self.num_restarts = 0


class ReplicaGroup:
    """Sends each request to the replica that the router chooses. While all have `max_answers`, requests wait here.

    All methods belong to the thread of one event loop. All that is sent to a replica within one iteration of the loop
    is one message, and so is all that a replica has to report.

    A replica that is lost (its process, its GPU, its host, or a step that failed) is started again, and its requests
    are computed by the others meanwhile. A request ends with an error of its own if it can't be queued, or if
    MAX_FAILURES replicas were lost while they computed it: it may be the reason. A replica that was lost MAX_FAILURES
    times in a row, without one answer in between, is not started again. When that is so for all replicas, every request
    ends with an EngineDeadError that states the last cause.
    """

    def __init__(
        self,
        launch: Callable[[], Handle],
        num_replicas: int,
        max_answers: int,
        block_size: int,
        router: Router | None = None,
    ):
        """Without `router`, a PrefixRouter for caches of blocks of `block_size` tokens."""
        self.slots = [Slot(i) for i in range(num_replicas)]
        self.error: Exception | None = None  # that ended the group
        self.on_failure: list[Callable[[BaseException], None]] = []  # the group has ended
        self._launch, self._max_answers = launch, max_answers
        self._block_size, self._given_router = block_size, router
        self._waiting: deque[ReplicaRequest] = deque()
        self._is_flushing = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- start and end -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas side by side; the first error ends all of them, and is raised."""
        try:
            await asyncio.gather(*[self._start(slot) for slot in self.slots])
        except BaseException:
            self.kill()
            raise
        num_blocks = min(slot.facts["num_blocks"] for slot in self.slots)
        self._router = self._given_router or PrefixRouter(len(self.slots), self._block_size, num_blocks)
        self._tasks = [asyncio.ensure_future(self._keep(slot)) for slot in self.slots]

    async def close(self) -> None:
        """Kill all replicas. Requests that have not ended get an EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(EngineDeadError("the engine was closed"))

    def kill(self) -> None:
        """End all replicas at once. No event loop is needed."""
        for slot in self.slots:
            slot.is_ready = False
            if slot.handle is not None:
                slot.handle.kill()
                slot.handle = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[ReplicaRequest]) -> None:
        if self.error is not None:
            for request in requests:
                self._fail(request, self.error)
            return
        self._waiting += requests
        self._dispatch()

    def discard(self, requests: Iterable[ReplicaRequest]) -> None:
        """End requests without an output, those that have not ended yet."""
        numbers: dict[int, list[int]] = {}
        waiting = set()
        for request in requests:
            if request.replica is not None:
                numbers.setdefault(request.replica, []).append(request.request_id)
                self._release(request)
            else:
                waiting.add(request)
        if waiting:
            self._waiting = deque(request for request in self._waiting if request not in waiting)
        for replica, own in numbers.items():
            self._send_all()  # a request may still be among those to be sent
            self._call(self.slots[replica], "discard", own)
        self._dispatch()

    def abort(self, request: ReplicaRequest) -> None:
        """End a request with the tokens that it has."""
        if request.replica is not None:
            self._send_all()
            self._call(self.slots[request.replica], "abort", request.request_id)

    @property
    def num_ready(self) -> int:
        return sum(slot.is_ready for slot in self.slots)

    async def stats(self) -> list[dict[str, Any] | None]:
        """`LLM.stats` of each replica; None for one that does not run."""

        async def stats_of(slot: Slot) -> dict[str, Any] | None:
            try:
                return await slot.handle.call("stats") if slot.is_ready and slot.handle else None
            except Exception:  # the replica was lost; its own task handles that
                return None

        return [*await asyncio.gather(*map(stats_of, self.slots))]

    # -- where requests are computed -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send requests that wait, as far as there are replicas that take them."""
        while self._waiting:
            loads = [
                slot.num_answers if slot.is_ready and slot.num_answers < self._max_answers else None
                for slot in self.slots
            ]
            if all(load is None for load in loads):
                return
            request = self._waiting.popleft()
            slot = self.slots[self._router.choose(request.prompt_token_ids, loads)]
            slot.requests[request.request_id] = request
            slot.num_answers += request.num_answers
            slot.to_send.append(request.message(slot.index))
            if not self._is_flushing:
                self._is_flushing = True
                asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_flushing = False
        for slot in self.slots:
            if slot.to_send:
                requests, slot.to_send = slot.to_send, []
                self._call(slot, "submit", encode_requests(requests))

    @staticmethod
    def _call(slot: Slot, method: str, *arguments: Any) -> None:
        if slot.handle is not None:  # else the replica was lost, and its requests were moved
            slot.handle.call(method, *arguments)

    def _release(self, request: ReplicaRequest) -> None:
        """A replica no longer computes this request."""
        assert request.replica is not None
        slot = self.slots[request.replica]
        del slot.requests[request.request_id]
        slot.num_answers -= request.num_answers
        request.replica = None

    @staticmethod
    def _fail(request: ReplicaRequest, error: Exception) -> None:
        request.fail(error)
        request.on_end(request)

    # -- a replica's life ----------------------------------------------------------------------------------------------

    async def _start(self, slot: Slot) -> None:
        slot.handle = self._launch()
        slot.facts = await slot.handle.start()
        slot.is_ready = True

    async def _keep(self, slot: Slot) -> None:
        """Read what a replica reports, and start it again whenever it is lost."""
        while True:
            try:
                if slot.handle is None:
                    await asyncio.sleep(RESTART_SECONDS * (slot.num_failures - 1))
                    await self._start(slot)
                    slot.num_restarts += 1
                    logger.info("replica %d runs again", slot.index)
                    self._dispatch()
                assert slot.handle is not None
                async for report in slot.handle.reports():
                    self._take(slot, report)
                raise RuntimeError(f"replica {slot.index} has ended")
            except Exception as error:
                slot.num_failures += 1
                logger.warning(
                    "replica %d was lost (%d of %d in a row): %s", slot.index, slot.num_failures, MAX_FAILURES, error
                )
                self._move_requests(slot, error)
                if slot.num_failures >= MAX_FAILURES:
                    if all(other.num_failures >= MAX_FAILURES for other in self.slots):
                        self._end(_all_lost(error))
                    return

    def _take(self, slot: Slot, data: bytes) -> None:
        report = decode_report(data)
        for piece in report.pieces:
            if (request := slot.requests.get(piece.number)) is not None:
                request.add_piece(piece)
        for ended in report.ended:
            if (request := slot.requests.get(ended.number)) is not None:
                self._release(request)
                request.end(ended)
                assert request.final is not None
                self._router.computed(slot.index, request.prompt_token_ids + request.final.token_ids)
                slot.num_failures = 0
                request.on_end(request)
        for number, error in report.errors:
            if (request := slot.requests.get(number)) is not None:
                self._release(request)
                self._fail(request, error)
        self._dispatch()

    def _move_requests(self, slot: Slot, error: Exception) -> None:
        """The replica was lost: its requests are the first that wait for another one."""
        if slot.handle is not None:
            slot.handle.kill()
        slot.handle, slot.is_ready, slot.to_send = None, False, []
        self._router.forget(slot.index)
        requests = [*slot.requests.values()]
        for request in requests:
            self._release(request)
            request.num_failures += 1
            if request.num_failures >= MAX_FAILURES:
                self._fail(request, _lost_with(request, error))
        self._waiting.extendleft(request for request in reversed(requests) if not request.has_ended)
        self._dispatch()

    def _end(self, error: Exception) -> None:
        """Kill all replicas, and end every request with this error."""
        if self.error is None:
            self.error = error
            self.kill()
            for observe_failure in self.on_failure:
                observe_failure(error)
        requests = [request for slot in self.slots for request in slot.requests.values()]
        for request in requests:
            self._release(request)
        requests += self._waiting
        self._waiting.clear()
        for request in requests:
            self._fail(request, error)


def _all_lost(error: Exception) -> EngineDeadError:
    dead = EngineDeadError(f"all replicas were lost {MAX_FAILURES} times in a row; the last one by {error!r:.2000}")
    dead.__cause__ = error
    return dead


def _lost_with(request: ReplicaRequest, error: Exception) -> Exception:
    return RuntimeError(
        f"request {request.request_id}: {request.num_failures} replicas were lost while they computed it; the last "
        f"one by {error!r:.500}"
    )

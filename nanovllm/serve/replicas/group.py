"""N replicas for one event loop: which of them computes what, and what happens when one is lost."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.replicas.messages import decode_report
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.routing import GuardedRouter, PrefixRouter, Router
from nanovllm.serve.replicas.slot import ClusterDeadError, Handle, Slot

logger = logging.getLogger("nanovllm")
MAX_FAILURES = 3  # in a row, of a replica or while a request is computed; see ReplicaGroup
# before a replica is started again, times its failures in a row; the ranks of a dead engine need a moment to end
RESTART_SECONDS = 2.0
START_LOG_SECONDS = 60.0  # between two lines of the log about a replica that has not started yet
RESTART_TIMEOUT = 1800.0


class ReplicaGroup:
    """Sends each request to the replica that the router chooses. While all have `max_answers`, requests wait here.

    All methods belong to the thread of one event loop. All that is sent to a replica within one iteration of the loop
    is one message, and so is all that a replica has to report.

    A replica that is lost (its process, its GPU, its host, or a step that failed) is started again, and its requests
    are computed by the others meanwhile. A request ends with an error of its own if it can't be queued, or if
    MAX_FAILURES replicas were lost while they computed it, the last of them while it computed nothing else: a request
    whose next loss would be that one is a suspect, and gets a replica to itself, one suspect at a time.

    A replica that was lost MAX_FAILURES times in a row, without an answer or some minutes of running in between, is
    not started again; losses with a suspect do not count. When that is so for all replicas, every request ends with
    an EngineDeadError that states the last cause.
    """

    def __init__(
        self,
        launch: Callable[[], Handle],
        num_replicas: int,
        max_answers: int,
        block_size: int,
        router: Router | None = None,
        restart_timeout: float = RESTART_TIMEOUT,
    ):
        """Without `router`, a PrefixRouter for caches of blocks of `block_size` tokens.

        restart_timeout: seconds after which a restart (also one that waits for a GPU or a host) counts as a failure.
        """
        self.slots = [Slot(i) for i in range(num_replicas)]
        self.error: Exception | None = None  # that ended the group
        self.on_failure: list[Callable[[BaseException], None]] = []  # the group has ended
        self._launch, self._max_answers = launch, max_answers
        self._block_size, self._given_router = block_size, router
        self._restart_timeout = restart_timeout
        self._waiting: list[tuple[tuple, ReplicaRequest]] = []  # a heap, in the order of the scheduling policy
        self._suspects: deque[ReplicaRequest] = deque()  # that wait until one of them can have a replica to itself
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
        if self.error is not None:  # closed meanwhile
            self.kill()
            raise self.error
        num_blocks = min(slot.start_info["num_blocks"] for slot in self.slots)
        self._router = GuardedRouter(self._given_router or PrefixRouter(len(self.slots), self._block_size, num_blocks))
        self._tasks = [asyncio.ensure_future(self._supervise(slot)) for slot in self.slots]

    async def close(self) -> None:
        """Kill all replicas. Requests that have not ended get an EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_group(EngineDeadError("the engine was closed"))

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
        if not self._tasks:
            raise RuntimeError("the replicas are not started yet")
        self._wait(requests)
        self._dispatch()

    def discard(self, requests: Iterable[ReplicaRequest]) -> None:
        """End requests without an output, those that have not ended yet."""
        numbers: dict[int, list[int]] = {}
        waiting = set()
        for request in requests:
            if request.replica is not None:
                numbers.setdefault(request.replica, []).append(request.request_id)
                self.slots[request.replica].release(request)
            else:
                waiting.add(request)
        self._stop_waiting(waiting)
        for replica, own in numbers.items():
            self._send_all()  # a request may still be among those to be sent
            self.slots[replica].call("discard", own)
        self._dispatch()

    def abort(self, request: ReplicaRequest) -> None:
        """End a request with the tokens that it has."""
        if request.replica is not None:
            request.is_aborted = True  # if the replica is lost before it has ended the request, the front does that
            slot = self.slots[request.replica]
            self._send_all()
            slot.call("abort", request.request_id)
        elif not request.has_ended:
            self._stop_waiting({request})
            request.end_aborted()
            request.on_end(request)

    def _wait(self, requests: Iterable[ReplicaRequest]) -> None:
        for request in requests:
            heappush(self._waiting, (request.order, request))

    def _stop_waiting(self, requests: set[ReplicaRequest]) -> None:
        if requests:
            self._waiting = [entry for entry in self._waiting if entry[1] not in requests]
            heapify(self._waiting)
            self._suspects = deque(request for request in self._suspects if request not in requests)
            for slot in self.slots:
                if slot.suspect in requests:
                    slot.suspect = None

    @property
    def num_ready(self) -> int:
        return sum(slot.is_ready for slot in self.slots)

    async def stats(self) -> list[dict[str, Any] | None]:
        """`LLM.stats` of each replica, and its number of `restarts`; None for one that does not answer in time."""
        return [*await asyncio.gather(*[slot.stats() for slot in self.slots])]

    # -- where requests are computed -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send requests that wait, as far as there are replicas that take them."""
        self._dispatch_suspects()
        while self._waiting:
            loads = [slot.load(self._max_answers) for slot in self.slots]
            if all(load is None for load in loads):
                return
            _, request = heappop(self._waiting)
            self._assign(request, self.slots[self._router.choose(request.prompt_token_ids, loads)])

    def _dispatch_suspects(self) -> None:
        """Reserve the least loaded replica for one suspect, and send it there once the replica has nothing else."""
        reserved = next((slot for slot in self.slots if slot.suspect is not None), None)
        if reserved is None and self._suspects and (ready := [slot for slot in self.slots if slot.is_ready]):
            reserved = min(ready, key=lambda slot: slot.num_answers)
            reserved.suspect = self._suspects.popleft()
        if reserved is not None and reserved.suspect is not None and not reserved.requests:
            self._assign(reserved.suspect, reserved)

    def _assign(self, request: ReplicaRequest, slot: Slot) -> None:
        slot.add(request)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_flushing = False
        for slot in self.slots:
            if slot.to_send:
                self._fail_some(slot, slot.send())

    def _fail_some(self, slot: Slot, errors: list[tuple[int, Exception]]) -> None:
        for number, error in errors:
            if (request := slot.requests.get(number)) is not None:  # else it was discarded
                slot.release(request)
                self._fail(request, error)

    @staticmethod
    def _fail(request: ReplicaRequest, error: Exception) -> None:
        request.fail(error)
        request.on_end(request)

    # -- a replica's life ----------------------------------------------------------------------------------------------

    async def _start(self, slot: Slot) -> None:
        slot.handle = self._launch()
        slot.start_info = await slot.handle.start()
        slot.is_ready, slot.ready_time = True, asyncio.get_running_loop().time()

    async def _start_again(self, slot: Slot) -> None:
        """RuntimeError after `restart_timeout` seconds."""
        await asyncio.sleep(RESTART_SECONDS * max(1, slot.num_failures))
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._restart_timeout
        start = asyncio.ensure_future(self._start(slot))
        try:
            while (left := deadline - clock()) > 0:
                await asyncio.wait([start], timeout=min(left, START_LOG_SECONDS))
                if start.done():
                    return await start
                logger.warning("replica %d is not ready yet: it loads, or waits for %s", slot.index, slot.handle)
            raise RuntimeError(
                f"it did not start within {self._restart_timeout:.0f} s: it had to wait for {slot.handle}"
            )
        finally:
            start.cancel()

    async def _supervise(self, slot: Slot) -> None:
        """Read what a replica reports, and start it again whenever it is lost."""
        while True:
            try:
                if slot.handle is None:
                    await self._start_again(slot)
                    slot.num_restarts += 1
                    logger.info("replica %d runs again", slot.index)
                    self._dispatch()
                assert slot.handle is not None
                async for report in slot.handle.reports():
                    self._process_report(slot, report)
                raise RuntimeError(f"replica {slot.index} has ended")
            except ClusterDeadError as error:
                self._fail_group(error)
                return
            except Exception as error:
                slot.count_failure(asyncio.get_running_loop().time())
                logger.warning(
                    "replica %d was lost (%d of %d in a row): %s", slot.index, slot.num_failures, MAX_FAILURES, error
                )
                self._move_requests(slot, error)
                if slot.num_failures >= MAX_FAILURES:
                    if all(other.num_failures >= MAX_FAILURES for other in self.slots):
                        self._fail_group(_all_lost(error))
                    return

    def _process_report(self, slot: Slot, data: bytes) -> None:
        report = decode_report(data)
        for piece in report.pieces:
            if (request := slot.requests.get(piece.number)) is not None:
                try:
                    request.add_piece(piece)
                except RuntimeError as error:
                    self.discard([request])
                    self._fail(request, error)
        for ended in report.ended:
            if (request := slot.requests.get(ended.number)) is not None:
                slot.release(request)
                slot.num_failures = 0
                request.end(ended)
                request.on_end(request)
                assert request.final is not None
                self._router.computed(slot.index, request.prompt_token_ids + request.final.token_ids)
        self._fail_some(slot, report.errors)
        self._dispatch()

    def _move_requests(self, slot: Slot, error: Exception) -> None:
        """The replica was lost: its requests wait for another one, before those that were submitted after them."""
        if slot.handle is not None:
            slot.handle.kill()
        slot.handle, slot.is_ready, slot.to_send = None, False, []
        self._router.forget(slot.index)
        if slot.suspect is not None and slot.suspect.replica is None:  # it has not been sent
            self._suspects.appendleft(slot.suspect)
            slot.suspect = None
        requests = [*slot.requests.values()]
        for request in requests:
            slot.release(request)
            request.num_failures += 1
            if request.is_aborted:
                request.end_aborted()
            elif request.num_failures >= MAX_FAILURES:
                request.fail_after_losses(error)
            if request.has_ended:
                request.on_end(request)
        left = [request for request in requests if not request.has_ended]
        self._suspects += [request for request in left if request.num_failures == MAX_FAILURES - 1]
        self._wait(request for request in left if request.num_failures < MAX_FAILURES - 1)
        self._dispatch()

    def _fail_group(self, error: Exception) -> None:
        """Kill all replicas, and end every request with this error."""
        if self.error is None:
            self.error = error
            self.kill()
            for observe_failure in self.on_failure:
                observe_failure(error)
        requests = [*self._suspects, *(request for _, request in sorted(self._waiting))]
        for slot in self.slots:
            if slot.suspect is not None and slot.suspect.replica is None:
                requests.append(slot.suspect)
                slot.suspect = None
            for request in [*slot.requests.values()]:
                slot.release(request)
                requests.append(request)
        self._suspects.clear()
        self._waiting.clear()
        for request in requests:
            self._fail(request, error)


def _all_lost(error: Exception) -> EngineDeadError:
    dead = EngineDeadError(f"all replicas were lost {MAX_FAILURES} times in a row; the last one by {error!r:.2000}")
    dead.__cause__ = error
    return dead

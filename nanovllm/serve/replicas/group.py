"""Distributes requests to a group of replicas, and restarts lost replicas. Everything runs in one event loop."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.replicas.messages import decode_report
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.replica_state import ClusterDeadError, Handle, ReplicaState
from nanovllm.serve.replicas.routing import GuardedRouter, PrefixRouter, Router

logger = logging.getLogger("nanovllm")
MAX_FAILURES = 3  # consecutive losses of a replica, or losses of replicas that compute a request; see ReplicaGroup
RESTART_SECONDS = 2.0  # delay of a restart per consecutive loss, because the ranks of a dead engine need time to end
START_LOG_SECONDS = 60.0  # between two log lines about a replica that has not started yet
RESTART_TIMEOUT = 1800.0


class ReplicaGroup:
    """Sends each request to a replica that the router chooses. Requests wait while no replica can take more requests.

    Only the thread of one event loop may call the group's methods. If several requests for a replica arrive within one
    iteration of the loop, one message contains all of them.

    A replica is lost if its process, GPU or host fails, or if a step raises an error. While a lost replica restarts,
    other replicas compute its requests. A request fails if it can't be queued, or if MAX_FAILURES replicas were lost
    while they computed it. If MAX_FAILURES - 1 replicas were lost while they computed a request, this request may be
    the cause. A request that may cause losses is called a poison request, and runs alone on a replica. Poison requests
    run one at a time.

    A replica is not restarted after MAX_FAILURES consecutive losses. A loss during a poison request is not counted. The
    number of losses is set to 0 when the replica finishes a request, or when it has run for a few minutes. If no
    replica is left, every request fails with an EngineDeadError that states the cause of the last loss.
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
        """launch: a function that starts the process of a replica.
        max_answers: the maximum number of answers that a replica computes at a time.
        block_size: the number of tokens in a cache block of the replicas.
        router: chooses a replica for each request; `None` selects a PrefixRouter.
        restart_timeout: seconds after which a restart counts as failed, including the wait for a GPU or a host.
        """
        self.replicas = [ReplicaState(i) for i in range(num_replicas)]
        self.error: Exception | None = None  # the error that ended the group
        self.on_failure: list[Callable[[BaseException], None]] = []  # called when the group has ended
        self._launch, self._max_answers = launch, max_answers
        self._block_size, self._given_router, self._restart_timeout = block_size, router, restart_timeout
        self._waiting: list[tuple[tuple, ReplicaRequest]] = []  # a heap, in scheduling order
        self._poison_requests: deque[ReplicaRequest] = deque()  # each waits until it can run alone on a replica
        self._is_flushing = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- start and end -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas in parallel. If one replica fails, kill all replicas and raise the error."""
        try:
            await asyncio.gather(*[self._start(replica) for replica in self.replicas])
        except BaseException:
            self.kill()
            raise
        if self.error is not None:  # the group was closed in the meantime
            self.kill()
            raise self.error
        num_blocks = min(replica.start_info["num_blocks"] for replica in self.replicas)
        default = PrefixRouter(len(self.replicas), self._block_size, num_blocks)
        self._router = GuardedRouter(self._given_router or default)
        self._tasks = [asyncio.ensure_future(self._supervise(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """Kill all replicas. Unfinished requests fail with an EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_group(EngineDeadError("the engine was closed"))

    def kill(self) -> None:
        """Kill all replicas immediately, without an event loop."""
        for replica in self.replicas:
            replica.is_ready = False
            if replica.handle is not None:
                replica.handle.kill()
                replica.handle = None

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
        """Drop unfinished requests. They get no output."""
        request_ids: dict[int, list[int]] = {}  # by the index of the replica
        waiting = set()
        for request in requests:
            if request.replica_index is not None:
                request_ids.setdefault(request.replica_index, []).append(request.request_id)
                self.replicas[request.replica_index].release(request)
            else:
                waiting.add(request)
        self._stop_waiting(waiting)
        for index, discarded in request_ids.items():
            self._send_all()  # the request may not have been sent yet
            self.replicas[index].call("discard", discarded)
        self._dispatch()

    def abort(self, request: ReplicaRequest) -> None:
        """End a request early. The caller gets the tokens generated so far."""
        if request.replica_index is not None:
            request.is_aborted = True  # if the replica is lost before it ends the request, the driver ends the request
            replica = self.replicas[request.replica_index]
            self._send_all()
            replica.call("abort", request.request_id)
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
            self._poison_requests = deque(request for request in self._poison_requests if request not in requests)
            for replica in self.replicas:
                if replica.poison_request in requests:
                    replica.poison_request = None

    @property
    def num_ready(self) -> int:
        return sum(replica.is_ready for replica in self.replicas)

    async def stats(self) -> list[dict[str, Any] | None]:
        """Return `LLM.stats()` and `restarts` of each replica, or None for a replica that does not answer in time."""
        return [*await asyncio.gather(*[replica.stats() for replica in self.replicas])]

    # -- where requests are computed -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._dispatch_poison_request()
        while self._waiting:
            loads = [replica.load(self._max_answers) for replica in self.replicas]
            if all(load is None for load in loads):
                return
            _, request = heappop(self._waiting)
            self._assign(request, self.replicas[self._router.choose(request.prompt_token_ids, loads)])

    def _dispatch_poison_request(self) -> None:
        """Reserve the least loaded replica for a poison request. Send the request when the replica is idle."""
        reserved = next((replica for replica in self.replicas if replica.poison_request is not None), None)
        ready = [replica for replica in self.replicas if replica.is_ready]
        if reserved is None and self._poison_requests and ready:
            reserved = min(ready, key=lambda replica: replica.num_answers)
            reserved.poison_request = self._poison_requests.popleft()
        if reserved is not None and reserved.poison_request is not None and not reserved.requests:
            self._assign(reserved.poison_request, reserved)

    def _assign(self, request: ReplicaRequest, replica: ReplicaState) -> None:
        replica.add(request)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_flushing = False
        for replica in self.replicas:
            if replica.to_send:
                self._fail_some(replica, replica.send())

    def _fail_some(self, replica: ReplicaState, errors: list[tuple[int, Exception]]) -> None:
        for request_id, error in errors:
            if (request := replica.requests.get(request_id)) is not None:  # otherwise, the request was discarded
                replica.release(request)
                self._fail(request, error)

    @staticmethod
    def _fail(request: ReplicaRequest, error: Exception) -> None:
        request.fail(error)
        request.on_end(request)

    # -- a replica's life ----------------------------------------------------------------------------------------------

    async def _start(self, replica: ReplicaState) -> None:
        replica.handle = self._launch()
        replica.start_info = await replica.handle.start()
        replica.is_ready, replica.ready_time = True, asyncio.get_running_loop().time()

    async def _start_again(self, replica: ReplicaState) -> None:
        """Restart a lost replica. Raises RuntimeError if the restart takes longer than `restart_timeout` seconds."""
        await asyncio.sleep(RESTART_SECONDS * max(1, replica.num_failures))
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._restart_timeout
        start = asyncio.ensure_future(self._start(replica))
        try:
            while (seconds_left := deadline - clock()) > 0:
                await asyncio.wait([start], timeout=min(seconds_left, START_LOG_SECONDS))
                if start.done():
                    return await start
                logger.warning("replica %d is not ready yet: it loads, or waits for %s", replica.index, replica.handle)
            raise RuntimeError(
                f"it did not start within {self._restart_timeout:.0f} s: it had to wait for {replica.handle}"
            )
        finally:
            start.cancel()

    async def _supervise(self, replica: ReplicaState) -> None:
        """Read the reports of a replica, and restart it whenever it is lost."""
        while True:
            try:
                if replica.handle is None:
                    await self._start_again(replica)
                    replica.num_restarts += 1
                    logger.info("replica %d runs again", replica.index)
                    self._dispatch()
                assert replica.handle is not None
                async for report in replica.handle.reports():
                    self._process_report(replica, report)
                raise RuntimeError(f"replica {replica.index} has ended")
            except ClusterDeadError as error:
                self._fail_group(error)
                return
            except Exception as error:
                replica.count_failure(asyncio.get_running_loop().time())
                failures = f"{replica.num_failures} of {MAX_FAILURES} in a row"
                logger.warning("replica %d was lost (%s): %s", replica.index, failures, error)
                self._move_requests(replica, error)
                if replica.num_failures >= MAX_FAILURES:
                    if all(other.num_failures >= MAX_FAILURES for other in self.replicas):
                        self._fail_group(_all_lost(error))
                    return

    def _process_report(self, replica: ReplicaState, data: bytes) -> None:
        report = decode_report(data)
        for delta in report.deltas:
            if (request := replica.requests.get(delta.request_id)) is not None:
                try:
                    request.add_event(delta)
                    request.tell()
                except RuntimeError as error:
                    self.discard([request])
                    self._fail(request, error)
        for final in report.finals:
            if (request := replica.requests.get(final.request_id)) is not None:
                replica.release(request)
                replica.num_failures = 0
                request.finish(final)
                request.tell()
                request.on_end(request)
                assert request.final is not None
                self._router.computed(replica.index, request.prompt_token_ids + request.final.token_ids)
        self._fail_some(replica, report.errors)
        self._dispatch()

    def _move_requests(self, replica: ReplicaState, error: Exception) -> None:
        """Put a lost replica's requests back into the queue, in the order of submission."""
        if replica.handle is not None:
            replica.handle.kill()
        replica.handle, replica.is_ready, replica.to_send = None, False, []
        self._router.forget(replica.index)
        if replica.poison_request is not None and replica.poison_request.replica_index is None:  # not sent yet
            self._poison_requests.appendleft(replica.poison_request)
            replica.poison_request = None
        requests = [*replica.requests.values()]
        for request in requests:
            replica.release(request)
            request.num_failures += 1
            if request.is_aborted:
                request.end_aborted()
            elif request.num_failures >= MAX_FAILURES:
                request.fail_after_losses(error)
            if request.has_ended:
                request.on_end(request)
        remaining = [request for request in requests if not request.has_ended]
        self._poison_requests += [request for request in remaining if request.num_failures == MAX_FAILURES - 1]
        self._wait(request for request in remaining if request.num_failures < MAX_FAILURES - 1)
        self._dispatch()

    def _fail_group(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.kill()
            for observe_failure in self.on_failure:
                observe_failure(error)
        requests = [*self._poison_requests, *(request for _, request in sorted(self._waiting))]
        for replica in self.replicas:
            if replica.poison_request is not None and replica.poison_request.replica_index is None:
                requests.append(replica.poison_request)
                replica.poison_request = None
            for request in [*replica.requests.values()]:
                replica.release(request)
                requests.append(request)
        self._poison_requests.clear()
        self._waiting.clear()
        for request in requests:
            self._fail(request, error)


def _all_lost(error: Exception) -> EngineDeadError:
    dead = EngineDeadError(f"all replicas were lost {MAX_FAILURES} times in a row; the last error: {error!r:.2000}")
    dead.__cause__ = error
    return dead

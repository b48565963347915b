"""Defines the driver's record of a replica. The record contains the replica's process and current requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.replicas.messages import NewRequest, encode_requests
from nanovllm.serve.replicas.replica_request import ReplicaRequest

logger = logging.getLogger("nanovllm")
STATS_TIMEOUT = 5.0
STABLE_SECONDS = 300.0  # uptime after which earlier losses of a replica are forgotten


class ClusterDeadError(EngineDeadError):
    """Ray has ended on this machine, so no replica can be started."""


class Handle(Protocol):
    """Controls a replica in another process.

    If the replica is lost, methods may raise any error. `start` may also raise ClusterDeadError.
    """

    async def start(self) -> dict[str, Any]: ...
    def reports(self) -> AsyncIterator[bytes]: ...
    def call(self, method: str, *arguments: Any) -> Any: ...
    def kill(self) -> None: ...


class ReplicaState:
    """The driver's record of a replica, which outlives the replica's process."""

    def __init__(self, index: int):
        self.index = index
        self.handle: Handle | None = None
        self.is_ready = False  # whether it takes requests
        self.ready_time = 0.0  # on the event loop's clock
        self.start_info: dict[str, Any] = {}  # the result of `Handle.start`
        self.requests: dict[int, ReplicaRequest] = {}  # by id: the requests that have not ended
        self.num_answers = 0  # the number of answers of these requests
        self.poison_request: ReplicaRequest | None = None  # a request that runs alone on the replica, or soon will
        self.to_send: list[NewRequest] = []
        self.num_failures = 0  # consecutive losses
        self.num_restarts = 0

    def load(self, max_answers: int) -> int | None:
        """Return the number of answers that the replica computes, or None if it accepts no requests now."""
        takes_more = self.is_ready and self.poison_request is None and self.num_answers < max_answers
        return self.num_answers if takes_more else None

    def add(self, request: ReplicaRequest) -> None:
        self.requests[request.request_id] = request
        self.num_answers += request.num_answers
        self.to_send.append(request.message(self.index))

    def release(self, request: ReplicaRequest) -> None:
        """Remove a request that the replica no longer computes."""
        del self.requests[request.request_id]
        self.num_answers -= request.num_answers
        if self.poison_request is request:
            self.poison_request = None
        request.replica_index = None

    def send(self) -> list[tuple[int, Exception]]:
        """Send the added requests in one message. Return the ids and errors of requests that can't be pickled."""
        messages, self.to_send = self.to_send, []
        failed = []
        try:
            data = encode_requests(messages)
        except Exception:
            sound = []
            for message in messages:
                try:
                    encode_requests([message])
                    sound.append(message)
                except Exception as error:
                    failed.append((message.request_id, error))
            data, messages = encode_requests(sound), sound
        if messages:
            self.call("submit", data)
        return failed

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the replica. If the call fails, kill the replica. Its reports then end."""
        if self.handle is None:  # the replica was lost, and other replicas got its requests
            return
        try:
            self.handle.call(method, *arguments)
        except Exception:
            logger.exception("replica %d can't be called", self.index)
            self.handle.kill()

    async def stats(self) -> dict[str, Any] | None:
        if not self.is_ready or self.handle is None:
            return None
        restarts = self.num_restarts
        try:
            result = await asyncio.wait_for(self.handle.call("stats"), STATS_TIMEOUT)
        except Exception:  # if the replica was lost, the end of its reports says so
            return None
        return result | {"restarts": restarts}

    def count_failure(self, now: float) -> None:
        """Count a loss of the replica, unless a poison request ran alone on it."""
        if self.is_ready and now - self.ready_time > STABLE_SECONDS:
            self.num_failures = 0
        if self.poison_request is None or self.poison_request.replica_index is None:
            self.num_failures += 1

"""Defines the engine client of `nanovllm serve --data-parallel-size N`. All N replicas share one HTTP address."""

import asyncio
import threading
from typing import Any

from nanovllm.requests.request import CompletionRequest
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.replicas import actors
from nanovllm.serve.replicas.driver import make_processor
from nanovllm.serve.replicas.group import RESTART_TIMEOUT
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.routing import Router
from nanovllm.utils.checks import check_int


class AsyncReplicas(EngineClient):
    """Works like AsyncLLM, but with several engines. Only the event loop that calls `start` may use this object."""

    has_one_engine = reads_adapters = False

    def __init__(
        self,
        model: str,
        *,
        num_replicas: int,
        max_queued_requests: int = 1024,
        router: Router | None = None,
        actor_options: dict[str, Any] | None = None,
        restart_timeout: float = RESTART_TIMEOUT,
        **settings: Any,
    ) -> None:
        """The arguments and errors are the same as for RayLLM and AsyncLLM. The method `start` loads the model."""
        num_replicas = check_int("num_replicas", num_replicas, low=1)
        max_queued = check_int("max_queued_requests", max_queued_requests, low=0)
        processor = make_processor(model, settings)
        super().__init__(processor, num_replicas * processor.config.max_num_seqs + max_queued)
        self._owns_ray = actors.connect()
        self.group = actors.make_group(
            model, settings, processor.config, num_replicas, router, actor_options, restart_timeout=restart_timeout
        )
        self.group.on_failure.append(self._on_failure)
        self._group_loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._group_loop, self._group_thread = asyncio.get_running_loop(), threading.get_ident()
        await self.group.start()

    def health(self) -> dict[str, Any]:
        self.check_open()
        num_ready, num_replicas = self.group.num_ready, len(self.group.replicas)
        status = "unavailable" if not num_ready else "ok" if num_ready == num_replicas else "degraded"
        return {"status": status, "replicas": {"ready": num_ready, "total": num_replicas}}

    async def stats(self) -> list[dict[str, Any] | None]:
        return await self.group.stats()

    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        started = ReplicaRequest(request, self._on_end, name)
        self.group.submit([started])
        return started

    def _drop(self, request: AsyncRequest) -> None:
        assert isinstance(request, ReplicaRequest)
        self.group.discard([request])

    def _abort(self, request: AsyncRequest) -> None:
        assert isinstance(request, ReplicaRequest)
        self.group.abort(request)

    def _on_end(self, request: ReplicaRequest) -> None:
        if request.request_id in self._live:
            self._forget(request)

    def _on_failure(self, error: BaseException) -> None:
        if not self._is_closing:
            self._fail(error)

    def exit(self) -> None:
        """Kill the replicas, and stop Ray if this object started it.

        Raises RuntimeError if the event loop's thread calls this method.
        """
        if self._is_closing and self._group_loop is None:
            return
        loop = self._group_loop
        if loop is not None and loop.is_running() and threading.get_ident() == self._group_thread:
            raise RuntimeError("exit waits for the event loop: call it in another thread, or use `async with`")
        self._is_closing, self._group_loop = True, None
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(self.group.close(), loop).result()
        else:
            self.group.kill()
        super().exit()
        self.input_processor.close()
        if self._owns_ray:
            actors.disconnect()

"""Defines an asyncio interface to the engine.

Any number of tasks can submit requests. The engine's thread runs the engine's steps.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from nanovllm.engine.collector import StepOutput
from nanovllm.engine.engine import UnavailableError
from nanovllm.engine.outputs import OutputKind
from nanovllm.llm import LLM
from nanovllm.requests.request import CompletionRequest
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_calls import EngineCalls, StepSizes
from nanovllm.serve.engine_client import EngineClient, EngineDeadError, QueueFullError
from nanovllm.serve.notifying_collector import NotifyingCollector
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.lora.lora_request import LoRARequest

__all__ = ["AsyncLLM", "EngineDeadError", "QueueFullError"]
logger = logging.getLogger("nanovllm")


class AsyncLLM(EngineClient):
    """Generates text for any number of tasks of one event loop: `async for output in llm.generate(prompt, params)`.

    The work is divided among threads. The event loop's thread submits requests and receives events. A small thread pool
    renders chat templates and tokenizes prompts. The engine's thread runs the engine's steps, detokenizes, and notifies
    the event loop after each step. Detokenizing takes a few microseconds per token. If `async_scheduling` is on, the
    device computes the next step while the engine's thread detokenizes.

    A request ends when its task is cancelled or leaves the `async for` loop. The cache blocks of an ended request are
    freed before the next step. If a request fails, the error is raised in the task that waits for the request. An error
    in a step ends the engine, and raises EngineDeadError in all waiting tasks.
    """

    engine: LLM

    def __init__(self, model: str, *, max_queued_requests: int = 1024, **settings: Any) -> None:
        """Load the model. `settings` are the settings of `LLM`. Raises the same errors as `LLM`.

        max_queued_requests: how many answers may wait, in addition to `max_num_seqs` running answers. (A prompt has `n`
            answers.)
        """
        max_queued = check_int("max_queued_requests", max_queued_requests, low=0)
        self.engine = LLM(model, **settings)
        super().__init__(self.engine.input_processor, self.engine.config.max_num_seqs + max_queued)
        self._engine_thread = self.engine.engine_thread
        self._calls = EngineCalls(self.engine, StepSizes(self.engine))
        # requests of the kind TOKENS use this collector, too
        self._collector = NotifyingCollector(OutputKind.DELTA, self._on_output, self._on_failure)
        self._told: asyncio.AbstractEventLoop | None = None  # the event loop that was already told about new outputs
        self._engine_thread.watch(self._collector)

    # -- the event loop's thread ---------------------------------------------------------------------------------------

    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        try:
            self._engine_thread.submit([request], self._collector)
        except UnavailableError:  # temporary: the engine is paused, asleep, or gets new weights
            raise
        except RuntimeError as error:
            if not self._is_closing:  # if nobody has closed the engine, another rank has died
                self._end(error)
            self.check_open()
        return AsyncRequest(request, name)

    def _drop(self, request: AsyncRequest) -> None:
        self._engine_thread.discard([request.request_id])

    def _abort(self, request: AsyncRequest) -> None:
        self._engine_thread.abort(request.request_id)

    async def call(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self._calls, name), *arguments)

    async def sleep(self, level: int = 1, keep_prefix_cache: bool = False) -> int:
        return await asyncio.to_thread(self.engine.sleep, level, keep_prefix_cache)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        await asyncio.to_thread(self.engine.wake_up, tags)

    async def is_sleeping(self) -> bool:
        return self.engine.is_sleeping()

    async def add_lora(self, lora_request: "LoRARequest") -> None:
        await asyncio.to_thread(self.engine.add_lora, lora_request)

    async def remove_lora(self, lora_int_id: int) -> bool:
        return self.engine.remove_lora(lora_int_id)

    def _take(self) -> None:
        self._told = None
        output = StepOutput()
        self._collector.take_into(output)  # after an error, `_fail_all` follows
        self._deliver(output.events, output.finished)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _on_output(self) -> None:
        if self._told is not (loop := self._loop):
            self._told = loop
            self._call_in_loop(self._take)

    def _on_failure(self, error: RuntimeError) -> None:
        if self._is_closing or error.__cause__ is None:  # closed by `exit` or when Python ends
            self._is_closing = True
            self._call_in_loop(self._fail_all)
        else:
            self._end(error.__cause__)

    def _end(self, error: BaseException) -> None:
        self._is_closing = True
        logger.error("the engine has failed: %s", error, exc_info=error)
        try:
            self._fail(error)
        finally:
            self._call_in_loop(self._fail_all)
            self.engine.exit()

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop was closed, and its tasks with it
            self._engine_thread.discard([*self._collector.live])

    # -- the end -------------------------------------------------------------------------------------------------------

    def exit(self) -> None:
        """End the engine after the current step, and free the device's memory.

        All waiting tasks get an EngineDeadError.
        """
        super().exit()
        self.engine.exit()

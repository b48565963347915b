"""The engine for asyncio: any number of tasks ask for answers, and one thread runs the steps for all of them."""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.engine.outputs import StepOutput
from nanovllm.engine.request import CompletionRequest
from nanovllm.llm import LLM
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_client import EngineClient, EngineDeadError, QueueFullError
from nanovllm.utils.checks import check_int

__all__ = ["AsyncLLM", "EngineDeadError", "QueueFullError"]
logger = logging.getLogger("nanovllm")


class AsyncLLM(EngineClient):
    """`async for output in llm.generate(prompt, params)`, for any number of tasks of one event loop at a time.

    Three kinds of threads share the work. The event loop only hands over requests and takes events. A small pool
    renders chat templates and tokenizes. One thread owns the engine: between two steps it adds and ends requests, and
    after each step it passes all new events to the event loop in one call. Token ids become text in that thread as
    well: this takes a few microseconds a token, and with `async_scheduling` it happens while the device computes the
    next step. README.md in this folder has the figures.

    A task that is cancelled, or leaves its loop, ends its request, whose blocks are free before the next step. An error
    in a request is raised to its own caller. An error in a step ends everything: all callers get an EngineDeadError.
    """

    engine: LLM

    def __init__(self, model: str, *, max_queued_requests: int = 1024, **settings: Any) -> None:
        """`settings` are those of `LLM`. Loads the model before it returns, with the errors of `LLM`.

        max_queued_requests: how many answers may wait in addition to the `max_num_seqs` that run. Each of `n` counts.
        """
        max_queued = check_int("max_queued_requests", max_queued_requests, low=0)
        self.engine = LLM(model, **settings)
        super().__init__(self.engine.processor, self.engine.config.max_num_seqs + max_queued)
        self._commands: deque[Callable[[], None]] = deque()  # for the engine's thread, between two steps
        self._wake = threading.Event()  # there are commands, or it is time to end
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.exit)  # a thread that uses the device must not outlive the interpreter

    # -- the event loop's thread ---------------------------------------------------------------------------------------

    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        self._post(partial(self.engine.core.submit, [request]))
        return AsyncRequest(request, name)

    def _drop(self, request: AsyncRequest) -> None:
        self._post(partial(self.engine.core.discard, [request.request]))

    def _abort(self, request: AsyncRequest) -> None:
        self._post(partial(self.engine.core.abort, request.request_id))

    async def stats(self) -> list[dict[str, Any] | None]:
        return [self.engine.stats()]

    def _deliver(self, output: StepOutput) -> None:
        """What a step has brought."""
        for event in output.events:
            if (request := self._live.get(event.request_id)) is not None:
                request.add_event(event)
                if request.final is not None:
                    self._forget(request)
        for final in output.finished:
            if (request := self._live.get(final.request_id)) is not None:
                request.finish(final)
                self._forget(request)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        core = self.engine.core
        try:
            while not self._is_closing:
                while self._commands:
                    self._commands.popleft()()
                if core.requests or any(inbox.is_ready for inbox in self._inboxes):
                    output = core.next_output(self._inboxes)
                    if output.events or output.finished:
                        self._call_in_loop(partial(self._deliver, output))
                else:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            logger.exception("the engine has failed")
            self.error = error
            for report in self.on_failure:
                report(error)
        finally:
            self._is_closing = True
            self._call_in_loop(self._fail_all)  # before work with the device, which may hang
            self.engine.exit()

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop was closed, and its tasks with it
            if not self._is_closing:
                abandoned = [request.request for request in [*self._live.values()]]
                self._commands.append(partial(self.engine.core.discard, abandoned))

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # -- the end -------------------------------------------------------------------------------------------------------

    def exit(self) -> None:
        """End the thread after the current step, and free the device's memory. Callers get an EngineDeadError."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        self._close_pools()
        atexit.unregister(self.exit)

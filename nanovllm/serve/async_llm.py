"""The engine for asyncio: any number of tasks ask for answers, and one thread runs the steps for all of them."""

import asyncio
import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer, TokenBytes
from nanovllm.engine.inbox import Inbox, OutputKind
from nanovllm.engine.outputs import RequestOutput, StepOutput, StreamEvent
from nanovllm.engine.prompts import Prompt
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.async_request import AsyncRequest, PartialOutput
from nanovllm.utils.checks import check_int

logger = logging.getLogger("nanovllm")


class QueueFullError(RuntimeError):
    """As many requests as the engine accepts are waiting or running. Nothing was queued; try again later."""


class EngineDeadError(RuntimeError):
    """The engine was closed, or a step has failed. No further request is accepted."""


class AsyncLLM:
    """`async for output in llm.generate(prompt, params)`, for any number of tasks of one event loop at a time.

    Three kinds of threads share the work. The event loop only hands over requests and takes events. A small pool
    renders chat templates and tokenizes. One thread owns the engine: between two steps it adds and ends requests, and
    after each step it passes all new events to the event loop in one call. Token ids become text in that thread as
    well: this takes a few microseconds a token, and with `async_scheduling` it happens while the device computes the
    next step. README.md in this folder has the figures.

    A task that is cancelled, or leaves its loop, ends its request, whose blocks are free before the next step. An error
    in a request is raised to its own caller. An error in a step ends everything: all callers get an EngineDeadError.
    """

    def __init__(self, model: str, *, max_queued_requests: int = 1024, **settings: Any) -> None:
        """`settings` are those of `LLM`. Loads the model before it returns, with the errors of `LLM`.

        max_queued_requests: how many answers may wait in addition to the `max_num_seqs` that run. Each of `n` counts.
        """
        max_queued = check_int("max_queued_requests", max_queued_requests, low=0)
        self.engine = LLM(model, **settings)
        self.max_live = self.engine.config.max_num_seqs + max_queued
        self.error: BaseException | None = None  # that ended the engine
        self.on_failure: list[Callable[[BaseException], None]] = []  # called by the engine's thread
        self.on_end: list[Callable[[AsyncRequest], None]] = []  # called by the event loop's when a request has ended
        self._loop: asyncio.AbstractEventLoop | None = None  # of the tasks that wait
        self._live: dict[int, AsyncRequest] = {}  # by the engine's id; for the event loop's thread only
        self._names: dict[str, AsyncRequest | None] = {}  # by the caller's id; None while the prompt is tokenized
        self._num_live = 0  # answers
        self._numbers = itertools.count()
        self.token_bytes = TokenBytes(self.engine.tokenizer, skip_special_tokens=False)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="nanovllm-tokenizer")
        self._grammar_pool = ThreadPoolExecutor(2, thread_name_prefix="nanovllm-grammar")  # compiling may take seconds
        # one for callers that read every piece, one for those that wait for the complete answer
        self._inboxes = [Inbox(OutputKind.EVENTS), Inbox(OutputKind.TOKENS)]
        self._commands: deque[Callable[[], None]] = deque()  # for the engine's thread, between two steps
        self._wake = threading.Event()  # there are commands, or it is time to end
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.exit)  # a thread that uses the device must not outlive the interpreter

    # -- requests: all of this belongs to the event loop's thread ------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The answers to one prompt so far, whenever there is more of them; the last output is `finished`.

        `prompt`, `sampling_params` and `priority` are those of `LLM.add_request`, with its errors, and
        `chat_template_kwargs` are those of `LLM.chat`. `request_id` is for `abort`. QueueFullError if too many requests
        wait, EngineDeadError if the engine has failed or was closed. In all outputs but the last, `metrics` has nothing
        but the `arrival_time`.
        """
        async with self._submitted(prompt, sampling_params, request_id, priority, chat_template_kwargs) as request:
            partial_output = PartialOutput(request)
            while events := await request.next_events():
                for event in events:
                    partial_output.add(event)
                yield partial_output.output()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """The answers piece by piece, as `LLM.stream` gives them; arguments and errors are those of `generate`."""
        async with self._submitted(prompt, sampling_params, request_id, priority, chat_template_kwargs) as request:
            while events := await request.next_events():
                for event in events:
                    yield event

    @asynccontextmanager
    async def _submitted(self, *arguments: Any) -> AsyncIterator[AsyncRequest]:
        """The request of `submit`, which is dropped when the block ends."""
        request = await self.submit(*arguments)
        try:
            yield request
        finally:
            self.discard(request)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping | None = None,
        in_pieces: bool = True,
    ) -> AsyncRequest:
        """Queue a request, and return what `generate` and `stream` read from. The caller must `discard` it in the end.

        With `in_pieces=False` there is only its `result`, which takes less of the host's time. Arguments and errors are
        those of `generate`.
        """
        self.check_open()
        self._use_running_loop()
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        if name in self._names:
            raise ValueError(f"request_id={name!r:.80}: another request has this id")
        num_answers = getattr(sampling_params, "n", 1)
        if num_answers > self.max_live:
            raise ValueError(f"n={num_answers}: must be at most {self.max_live}, the answers that may run and wait")
        if self._num_live + num_answers > self.max_live:
            raise QueueFullError(f"{self._num_live} answers of at most {self.max_live} are running or waiting")
        self._num_live += num_answers
        self._names[name] = None
        try:
            make = partial(
                self.engine.processor.request,
                prompt,
                sampling_params,
                self._inboxes[0 if in_pieces else 1],
                template_arguments=chat_template_kwargs,
                priority=priority,
            )
            has_grammar = getattr(sampling_params, "structured_outputs", None) is not None
            pool = self._grammar_pool if has_grammar else self._pool
            request = AsyncRequest(await self._in_thread(pool, make), name)
            self.check_open()
        except BaseException:
            self._num_live -= num_answers
            del self._names[name]
            raise
        self._live[request.request_id] = self._names[name] = request
        self._post(partial(self.engine.core.submit, [request.request]))
        return request

    def discard(self, request: AsyncRequest) -> None:
        """Drop a request that has not ended. Nothing happens if it has."""
        if request.request_id in self._live:
            self._forget(request)
            self._post(partial(self.engine.core.discard, [request.request]))

    async def abort(self, request_id: str) -> None:
        """End a request before the next step; its caller gets the tokens that were generated.

        Nothing happens without such a request, or while its prompt is being tokenized.
        """
        if (request := self._names.get(request_id)) is not None:
            self._post(partial(self.engine.core.abort, request.request_id))

    async def tokenize(self, prompt: Prompt, chat_template_kwargs: Mapping | None = None) -> list[int]:
        """The token ids of a prompt, with the errors of `generate`."""
        self.check_open()
        call = partial(self.engine.processor.tokenize, prompt, chat_template_kwargs)
        return (await self._in_thread(self._pool, call))[1]

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included. ValueError for an id outside of the vocabulary."""
        self.check_open()
        vocab_size = self.engine.config.model_config.vocab_size

        def decode() -> str:
            for token_id in token_ids:
                check_int("tokens: token id", token_id, low=0, high=vocab_size - 1)
            return Detokenizer(token_ids, 0, SamplingParams(), self.token_bytes).decode(is_last=True)

        return await self._in_thread(self._pool, decode)

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
        """What `call` returns in a thread of `pool`. EngineDeadError if the engine ends before that."""

        def checked_call() -> Any:
            self.check_open()
            return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, checked_call)
        except RuntimeError:
            self.check_open()  # then that is why
            raise

    @property
    def num_unfinished(self) -> int:
        """Answers that are running or waiting."""
        return self._num_live

    def check_open(self) -> None:
        """EngineDeadError if no request can be accepted any more."""
        if self.error is not None:
            raise EngineDeadError(f"the engine has failed: {self.error!r}") from self.error
        if self._is_closing:
            raise EngineDeadError("the engine was closed")

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed() and self._num_live:
                raise RuntimeError("requests of another event loop are running: an AsyncLLM serves one loop at a time")
            for request in [*self._live.values()]:  # whose loop was closed
                self.discard(request)
            self._loop = loop

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

    def _forget(self, request: AsyncRequest) -> None:
        del self._live[request.request_id], self._names[request.name]
        self._num_live -= request.num_answers
        for observe in self.on_end:
            observe(request)

    def _fail_all(self) -> None:
        for request in [*self._live.values()]:
            try:
                self.check_open()
            except EngineDeadError as error:
                request.fail(error)
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
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False)  # what waits there gets an EngineDeadError
        atexit.unregister(self.exit)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.exit)

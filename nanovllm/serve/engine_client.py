"""Defines the server's interface to an engine. The interface checks, tokenizes and tracks requests."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, TypeVar

from nanovllm.engine.outputs import OutputKind, RequestOutput
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.llm import LLM
from nanovllm.lora.lora_request import LoRARequest
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_request import pooling_request
from nanovllm.requests.detokenizer import Detokenizer
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.request import CompletionRequest, Message, Prompt, TokensPrompt
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.async_request import AsyncRequest, PartialAnswer
from nanovllm.serve.beams import beam_completion
from nanovllm.serve.pooling_client import classify, embed, score
from nanovllm.serve.prompt_lanes import LongTextError, PromptLane, PromptSource, RenderedChat, reads_images
from nanovllm.serve.template_sandbox import MAX_PROCESSES, TemplateSandbox
from nanovllm.serve.turns import ClientTurns
from nanovllm.utils.checks import check_int

T = TypeVar("T")
MANY_IDS = 2**14  # the event loop itself checks prompts of at most this many token ids, in up to 0.2 ms


class QueueFullError(RuntimeError):
    """Too many requests are waiting or running. The request was not queued; the caller may try again later."""


class EngineDeadError(RuntimeError):
    """The engine was closed, or a step has failed. The engine accepts no further requests."""


class EngineClient(ABC):
    """Generates text for any number of tasks of one event loop: `async for output in llm.generate(prompt, params)`.

    Five thread pools prepare requests. The pools are for ordinary prompts, long texts (a single thread), images,
    grammars, and templates that may be slow. The subclass AsyncLLM computes answers with an engine in this process. The
    subclasses FrontClient and AsyncReplicas use engines in other processes. Subclasses call `_forget` when a request
    has ended.
    """

    engine: LLM | None = None  # the engine, if it runs in this process
    has_one_engine = True  # False for several replicas
    reads_adapters = True  # whether the server reads adapters through this client when it starts
    error: BaseException | None = None  # the error that ended the engine

    def __init__(self, processor: InputProcessor, max_live: int):
        """max_live: the maximum number of running and waiting answers. (A prompt has `n` answers.)"""
        self.input_processor, self.max_live = processor, max_live
        self.on_failure: list[Callable[[BaseException], None]] = []  # called in any thread when the engine has failed
        self.on_end: list[Callable[[AsyncRequest], None]] = []  # called in the event loop when a request has ended
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the waiting tasks
        self._live: dict[int, AsyncRequest] = {}  # by the engine's request id; only for the event loop's thread
        self._names: dict[str, AsyncRequest | None] = {}  # by the caller's id; None while the prompt is tokenized
        # how many answers run or wait in each EngineClient that shares `max_live`; index `_index` is this object
        self._num_live: MutableSequence[int] = [0]
        self._index = 0
        self._numbers = itertools.count()
        self._lane = PromptLane(processor, takes_long_texts=False)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="nanovllm-tokenizer")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-long-texts")
        self._image_pool = ThreadPoolExecutor(4, thread_name_prefix="nanovllm-images")
        self._grammar_pool = ThreadPoolExecutor(8, thread_name_prefix="nanovllm-grammar")  # compiling may take seconds
        self._grammar_turns = ClientTurns(2)  # half of the compiling processes
        self._template_sandbox = TemplateSandbox(processor.tokenizer)
        self._template_pool = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="nanovllm-templates")
        self._template_turns = ClientTurns(MAX_PROCESSES // 2)  # half of the rendering processes
        self._is_closing = False

    embed, score, classify = embed, score, classify  # the functions of pooling_client.py

    # -- computing the requests ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.check_open()

    @abstractmethod
    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        """Begin to compute a request. Return an object from which the caller reads answers."""

    @abstractmethod
    def _drop(self, request: AsyncRequest) -> None:
        """Stop computing a request whose caller has stopped waiting."""

    @abstractmethod
    def _abort(self, request: AsyncRequest) -> None:
        """End a request early."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine's EngineCalls by name.

        Raises NotImplementedError if there are several replicas.
        """
        raise NotImplementedError

    async def stats(self) -> list[dict[str, Any] | None]:
        """Return a list with each engine's `LLM.stats()`, or None for an engine that is not running."""
        return [await self.call("stats")]

    def exit(self) -> None:
        """End the engine. All waiting tasks get an EngineDeadError. Any thread may call this method."""
        self._is_closing = True
        self._template_sandbox.close()
        for pool in (self._pool, self._long_pool, self._image_pool, self._grammar_pool, self._template_pool):
            pool.shutdown(wait=False)  # waiting calls get an EngineDeadError

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`. If `status` is "unavailable", the HTTP status is 503.

        Raises EngineDeadError like `check_open`.
        """
        self.check_open()
        return {"status": "ok"}

    # -- requests: all of this belongs to the event loop's thread ------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield an output each time the answers to a prompt have grown. The last output has `finished=True`.

        `prompt`, `sampling_params`, `priority` and `lora_request` are the same as for `LLM.add_request`, and raise the
        same errors. Other options are `chat_template_kwargs` (see `LLM.chat`), `cache_salt` (see `submit`), and a
        `request_id` for `abort`. Raises QueueFullError if too many requests wait, and EngineDeadError if the engine has
        failed or was closed. Except in the last output, `metrics` contains only the `arrival_time`.
        """
        request = await self.submit(prompt, sampling_params, **options)
        try:
            answers = [PartialAnswer(i) for i in range(request.num_answers)]
            while events := await request.next_events():
                for event in events:
                    answers[event.output_index].add(event)
                yield request.output(answers)
        finally:
            self.discard(request)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[StreamEvent]:
        """Yield the answers piece by piece, like `LLM.stream`. Arguments and errors are the same as for `generate`."""
        request = await self.submit(prompt, sampling_params, **options)
        try:
            while events := await request.next_events():
                for event in events:
                    yield event
        finally:
            self.discard(request)

    async def submit(
        self,
        prompt: PromptSource,
        sampling_params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping | None = None,
        in_pieces: bool = True,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncRequest:
        """Queue a request. The caller reads from the returned object, and finally passes it to `discard`.

        Most arguments and all errors are the same as for `generate`. A `prompt` may be a function that makes the prompt
        in a tokenizer thread. If `in_pieces` is False, the request has a `result` but no events, which saves CPU time.
        Requests share cached prefixes only with requests that have the same `cache_salt` and adapter. Beam searches and
        requests with PoolingParams have a `result` but no events. Beam searches do not work with replicas.
        """
        self.check_open()
        self._use_running_loop()
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        if name in self._names:
            raise ValueError(f"request_id={name!r:.80}: another request has this id")
        num_answers = getattr(sampling_params, "n", 1)
        if num_answers > self.max_live:
            raise ValueError(f"n={num_answers}: must be at most {self.max_live}, the number that may run or wait")
        if self.num_unfinished + num_answers > self.max_live:
            raise QueueFullError(f"{self.num_unfinished} answers of at most {self.max_live} are running or waiting")
        self._num_live[self._index] += num_answers
        self._names[name] = None
        try:
            # not FINAL_ONLY, because observers must see when a token arrives
            kind = OutputKind.DELTA if in_pieces else OutputKind.TOKENS
            make = lambda tokens: self._make_request(tokens, sampling_params, kind, priority, cache_salt, lora_request)
            tokenize = lambda lane: lane.tokens_of(prompt, chat_template_kwargs)
            if getattr(sampling_params, "structured_outputs", None) is not None:
                compile_for = partial(make, await self._in_lane(tokenize, prompt))
                prepared = await self._grammar_turns.run(lambda: self._in_thread(self._grammar_pool, compile_for))
            elif _has_few_ids(prompt) and (lora_request is None or self.engine is None):
                prepared = make(tokenize(self._lane))  # without text to tokenize, this is faster than a thread
            else:
                prepared = await self._in_lane(lambda lane: make(tokenize(lane)), prompt)
            self.check_open()
            request = self._start(prepared, name)
        except BaseException:
            self._num_live[self._index] -= num_answers
            del self._names[name]
            raise
        self._live[request.request_id] = self._names[name] = request
        return request

    def _make_request(
        self,
        tokens: TokensPrompt,
        params: Any,
        kind: OutputKind,
        priority: int,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
    ) -> Any:
        """Make the request for a tokenized prompt. The class of `params` determines the kind of request."""
        processor = self.input_processor
        if isinstance(params, BeamSearchParams):
            request: Any = beam_completion(processor, tokens, params, priority, kind)
        elif isinstance(params, PoolingParams):
            request = pooling_request(processor, tokens, params, OutputKind.TOKENS, priority)
        else:
            request = processor.request(tokens, params, kind, priority=priority)
        processor.with_adapters([request], lora_request)
        if cache_salt is not None:
            salt = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            for seq in request.group:
                seq.cache_salt ^= int.from_bytes(salt, "little")
        return request

    def discard(self, request: AsyncRequest) -> None:
        """Drop a request that the caller no longer needs. If the request has ended, nothing happens."""
        if request.request_id in self._live:
            self._forget(request)
            self._drop(request)

    async def abort(self, request_id: str) -> None:
        """End a request early, before the engine's next step. The caller gets the tokens generated so far.

        Does nothing if no request has this id, or if its prompt is not yet tokenized.
        """
        if (request := self._names.get(request_id)) is not None:
            self._abort(request)

    async def tokenize(self, prompt: PromptSource, chat_template_kwargs: Mapping | None = None) -> list[int]:
        """Return the token ids of a prompt. Arguments and errors are the same as for `submit`."""
        self.check_open()
        tokens_of = lambda lane: lane.tokens_of(prompt, chat_template_kwargs)
        return (await self._in_lane(tokens_of, prompt))["prompt_token_ids"]

    async def render(self, messages: list[Message], template_arguments: Mapping[str, Any]) -> RenderedChat:
        """Render a conversation in the template sandbox, where a slow template can't delay other requests.

        Raises ValueError if rendering takes too long.
        """
        self.check_open()
        render = partial(self._template_sandbox.render, messages, template_arguments)
        return RenderedChat(await self._template_turns.run(lambda: self._in_thread(self._template_pool, render)))

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens, including special tokens. Raises ValueError for an id outside the vocabulary."""
        self.check_open()
        vocab_size = self.input_processor.config.model_config.vocab_size

        def decode() -> str:
            for token_id in token_ids:
                check_int("tokens: token id", token_id, low=0, high=vocab_size - 1)
            return Detokenizer(token_ids, 0, self.input_processor.all_token_bytes).decode(is_last=True)

        return await self._in_thread(self._pool, decode)

    async def _in_lane(self, call: Callable[[PromptLane], T], prompt: PromptSource) -> T:
        """Run `call` with the PromptLane for short texts, or with the PromptLane for long texts if the text is long.

        Other threads handle prompts with images, so that texts do not wait for images.
        """
        pool = self._image_pool if reads_images(prompt) else self._pool
        try:
            return await self._in_thread(pool, partial(call, self._lane))
        except LongTextError:
            return await self._in_thread(self._long_pool, lambda: call(self._long_lane))

    @cached_property
    def _long_lane(self) -> PromptLane:
        """The PromptLane for long texts.

        The thread for long texts creates this object on first use, because copying a large tokenizer takes 1 s.
        """
        return PromptLane(self.input_processor, takes_long_texts=True)

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        """Run `call` in a thread of `pool`. Raises EngineDeadError if the engine ends before `call` returns."""

        def checked_call() -> T:
            self.check_open()
            return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, checked_call)
        except Exception:
            self.check_open()  # if the engine has ended, this raises EngineDeadError instead
            raise

    @property
    def num_requests(self) -> int:
        return len(self._names)

    @property
    def num_unfinished(self) -> int:
        """The number of running and waiting answers."""
        return sum(self._num_live)

    def check_open(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine has failed: {self.error!r}") from self.error
        if self._is_closing:
            raise EngineDeadError("the engine was closed")

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed() and self._names:
                raise RuntimeError("requests of another event loop are running: an AsyncLLM serves one loop at a time")
            for request in [*self._live.values()]:  # the event loop of these requests was closed
                self.discard(request)
            self._loop = loop

    def _forget(self, request: AsyncRequest) -> None:
        del self._live[request.request_id], self._names[request.name]
        self._num_live[self._index] -= request.num_answers
        for observe in self.on_end:
            observe(request)

    def _deliver(self, events: Iterable[StreamEvent], finals: Iterable[Any]) -> None:
        news: dict[Callable[[], None], None] = {}  # a set, so that a stream of several requests is told only once
        find = self._live.get
        for event in events:
            if (request := find(event.request_id)) is not None:
                request.add_event(event)
                news[request.on_news or request.tell] = None
                if request.final is not None:
                    self._forget(request)
        for final in finals:
            if (request := self._live.get(final.request_id)) is not None:
                request.finish(final)
                news[request.on_news or request.tell] = None
                self._forget(request)
        for tell in news:
            tell()

    def _fail(self, error: BaseException) -> None:
        """Record that the engine has failed, and accept no more requests. `_fail_all` ends the requests."""
        self.error = error
        for report in self.on_failure:
            report(error)

    def _fail_all(self) -> None:
        for request in [*self._live.values()]:
            try:
                self.check_open()
            except EngineDeadError as error:
                request.fail(error)
            self._forget(request)

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *exception) -> None:
        await asyncio.to_thread(self.exit)


def _has_few_ids(prompt: PromptSource) -> bool:
    return isinstance(prompt, list) and len(prompt) <= MANY_IDS and {*map(type, prompt)} == {int}

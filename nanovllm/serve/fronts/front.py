"""Runs a front, which is a process that serves HTTP, tokenizes and detokenizes. The engine is in another process."""

import asyncio
import itertools
import logging
import os
import shutil
import socket
import sys
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import parent_process
from typing import Any

from msgspec import DecodeError

from nanovllm.engine.outputs import CompletionOutput
from nanovllm.engine.sequence import Sequence
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.address import listening_socket
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.beams import BeamCompletion
from nanovllm.serve.engine_client import EngineClient, EngineDeadError, QueueFullError
from nanovllm.serve.fronts.channel import Channel, FromEngine, FromFront, decode_from_engine, encode_request
from nanovllm.serve.fronts.engine_process import FrontPlan
from nanovllm.serve.process import set_up_process
from nanovllm.serve.replicas.driver import make_processor
from nanovllm.serve.replicas.messages import Final, NewRequest, sent_images
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.server import run_server

logger = logging.getLogger("nanovllm")
ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, QueueFullError)}  # other errors become RuntimeErrors
IDS_PER_FRONT = 2**40  # so that request ids are unique among all fronts of an engine


class FrontRequest(ReplicaRequest):
    """A request that runs in the engine's process.

    The front detokenizes the answers, unless the engine needs their text.
    """

    def __init__(self, request: Any, name: str):
        super().__init__(request, lambda ended: None, name)
        self._makes_text = isinstance(request, CompletionRequest) and _makes_text(request.params)

    def message(self, replica_index: int = 0) -> NewRequest:
        if isinstance(self.request, BeamCompletion):
            root, ids = self.request.group[0], self.prompt_token_ids
            params, kind = self.request.params, self.request.kind
            sent = self.request_id, 0, ids, root.params, root.priority, kind, [], []
            lora_request = self.request.lora_request
            return NewRequest(*sent, beams=params, lora_request=lora_request, images=sent_images(root))
        new = super().message(replica_index)
        return new._replace(params=replace(new.params, detokenize=False)) if self._makes_text else new

    def add_event(self, event: StreamEvent) -> None:
        if not self._makes_text:
            super().add_event(event)
            return
        seq, is_last = self._extended(event.output_index, event), event.finish_reason is not None
        num_hidden = self.request.num_hidden(seq) if is_last else 0
        text = self.request.detokenizer(seq).take_text(num_hidden, is_last)
        object.__setattr__(event, "text", text)  # the event is frozen, but no other object uses it
        self._events.append(event)

    def finish(self, final: Final) -> None:
        if self._makes_text:
            for answer in final.answers:
                self._extended(answer.index, answer)
            final = final._replace(answers=self.request.output().outputs)
        super().finish(final)

    def _extended(self, index: int, new: StreamEvent | CompletionOutput) -> Sequence:
        seq = self.request.group[index]
        seq.token_ids += new.token_ids
        seq.finish_reason, seq.stop_reason = new.finish_reason, new.stop_reason
        return seq


def _makes_text(params: SamplingParams) -> bool:
    return params.detokenize and params.logprobs is params.prompt_logprobs is None and not params.stop


class FrontClient(EngineClient):
    """The engine client of a front. Everything that one iteration of the event loop sends goes into one message."""

    reads_adapters = False  # the engine's process has read them; a front's first message says that the front listens

    def __init__(self, plan: FrontPlan, index: int, channel: Channel):
        processor = make_processor(plan.model, plan.engine_settings, index * IDS_PER_FRONT)
        super().__init__(processor, processor.config.max_num_seqs + plan.settings.max_queued_requests)
        self._num_live, self._index, self._channel = plan.num_live, index, channel
        self._to_send: FromFront | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}  # calls without a result so far
        self._call_numbers = itertools.count()
        self._has_started = asyncio.Event()
        self._arrived: deque[bytes] = deque()
        self._is_told = False  # whether the event loop knows that something has arrived

    async def start(self) -> None:
        """Wait until the engine has started."""
        self._engine_loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="nanovllm-channel", daemon=True).start()
        await self._has_started.wait()

    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        started = FrontRequest(request, name)
        self.next_message().requests.append(encode_request(started.message()))  # errors concern only this request
        for seq in request.group:
            seq.feature_state.pop("vision", None)  # the engine's process has the pixels now
        return started

    def _drop(self, request: AsyncRequest) -> None:
        self.next_message().discarded.append(request.request_id)

    def _abort(self, request: AsyncRequest) -> None:
        self.next_message().aborted.append(request.request_id)

    async def call(self, name: str, *arguments: Any) -> Any:
        self.check_open()
        number = next(self._call_numbers)
        self._calls[number] = result = asyncio.get_running_loop().create_future()
        self.next_message().calls.append((number, name, [*arguments]))
        try:
            return await result
        finally:
            self._calls.pop(number, None)

    def next_message(self) -> FromFront:
        if self._to_send is None:
            self._to_send = FromFront()
            self._engine_loop.call_soon(self._send, self._to_send)
        return self._to_send

    def _send(self, message: FromFront) -> None:
        self._to_send = None
        try:
            self._channel.send(message)
        except OSError as error:
            self._lose(str(error))
        except Exception as error:  # a call's arguments can't be encoded; requests are encoded already
            for number, *_ in message.calls:
                if not (call := self._calls[number]).done():
                    call.set_exception(RuntimeError(str(error)))
            message.calls = []
            self._channel.send(message)

    # -- received messages ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                self._arrived.append(self._channel.receive())
                if not self._is_told:
                    self._is_told = True
                    self._engine_loop.call_soon_threadsafe(self._receive)
        except OSError:
            if not self._is_closing:
                self._engine_loop.call_soon_threadsafe(self._lose, "its process has ended")

    def _receive(self) -> None:
        """Process all messages that have arrived.

        If messages of several steps have arrived, each stream gets all its new text as one piece.
        """
        self._is_told = False
        self._has_started.set()
        try:
            messages = [decode_from_engine(self._arrived.popleft()) for _ in range(len(self._arrived))]
        except DecodeError as error:  # otherwise, requests would wait forever for the content of the message
            self._lose(f"its message can't be read: {error}")
            return
        deltas = (delta for message in messages for delta in message.deltas)
        self._deliver(deltas, (final for message in messages for final in message.finals))
        for message in messages:
            self._take_errors_and_results(message)

    def _take_errors_and_results(self, message: FromEngine) -> None:
        for request_id, kind, text in message.errors:
            if (request := self._live.get(request_id)) is not None:
                self._forget(request)
                request.fail(ERRORS.get(kind, RuntimeError)(text))
        for number, result, problem in message.results:
            if (call := self._calls.get(number)) is None or call.done():
                continue  # the caller has gone away
            if problem:
                call.set_exception(RuntimeError(problem))
            else:
                call.set_result(result)
        if message.failure:
            self._lose(message.failure)

    def _lose(self, problem: str) -> None:
        if self.error is None and not self._is_closing:
            logger.error("the engine is lost, so this HTTP process ends: %s", problem)
            self._fail(RuntimeError(problem))
            self._fail_all()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(EngineDeadError(problem))

    def exit(self) -> None:
        super().exit()
        self._channel.close()


def serve_front(plan: FrontPlan, index: int, end: socket.socket) -> None:
    """Run a front until it ends. If the front can't start, tell the engine's process why."""
    set_up_process()
    channel = Channel(end)
    with ExitStack() as ending:
        try:
            llm = FrontClient(plan, index, channel)
            ending.callback(llm.exit)
            with plan.listener or listening_socket(plan.settings, is_of_front=True) as listener:
                status = run_server(llm, plan.settings, plan.model, listener, llm.next_message)
        except (ValueError, TypeError, OSError, ImportError) as error:
            channel.send(FromFront(problem=str(error)))
            status = 2
    if (parent := parent_process()) is not None and not parent.is_alive():  # a killed parent can't remove the folder
        shutil.rmtree(os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)
    sys.exit(status)

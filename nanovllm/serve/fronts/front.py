"""A front: the process that does HTTP, checks, tokens and text for an engine in another process."""

import asyncio
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import DecodeError

from nanovllm.engine.outputs import CompletionOutput
from nanovllm.engine.request import CompletionRequest
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stream_event import StreamEvent
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.fronts.channel import ERRORS, Channel, FromFront, decode_from_engine, encode_request
from nanovllm.serve.process import set_up_process
from nanovllm.serve.replicas.driver import make_processor
from nanovllm.serve.replicas.messages import Final, NewRequest
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.server import listening_socket, run_server
from nanovllm.serve.settings import ServerSettings

IDS_PER_FRONT = 2**40  # ids of requests are unique among all fronts of an engine


class FrontPlan(NamedTuple):
    """What all fronts of an engine need to know.

    num_live: in shared memory, the number of answers of each front: the bound holds for their sum, but for what several
        fronts accept in the same instant.
    listener: None is one of its own for each front, at the address of `settings`.
    """

    model: str
    settings: ServerSettings
    engine_settings: dict[str, Any]
    num_live: Any
    listener: socket.socket | None


class FrontRequest(ReplicaRequest):
    """A request that the engine's process computes. Its text is made here, unless the engine needs it as well."""

    def __init__(self, request: CompletionRequest, name: str):
        super().__init__(request, lambda ended: None, name)
        params = request.params
        self._makes_text = params.detokenize and params.logprobs is params.prompt_logprobs is None and not params.stop

    def message(self, replica_index: int = 0) -> NewRequest:
        new = super().message(replica_index)
        return new._replace(params=replace(new.params, detokenize=False)) if self._makes_text else new

    def add_event(self, event: StreamEvent) -> None:
        if self._makes_text:
            seq, is_last = self._extended(event.output_index, event), event.finish_reason is not None
            text = self.request.detokenizer(seq).take_text(self.request.num_hidden(seq), is_last)
            ids = event.index, event.output_index, event.request_id
            event = StreamEvent(*ids, text, event.token_ids, event.finish_reason, event.stop_reason, None)
        super().add_event(event)

    def finish(self, final: Final) -> None:
        if self._makes_text and final.answers:
            for answer in final.answers:
                self._extended(answer.index, answer)
            final = final._replace(answers=self.request.output().outputs)
        super().finish(final)

    def _extended(self, index: int, new: StreamEvent | CompletionOutput) -> Sequence:
        """The sequence of an answer, with the new tokens."""
        seq = self.request.group[index]
        seq.token_ids += new.token_ids
        seq.finish_reason, seq.stop_reason = new.finish_reason, new.stop_reason
        return seq


class FrontClient(EngineClient):
    """The engine as a front reaches it. What is sent within one turn of the event loop is one message."""

    def __init__(self, plan: FrontPlan, index: int, channel: Channel):
        processor = make_processor(plan.model, plan.engine_settings, index * IDS_PER_FRONT)
        super().__init__(processor, processor.config.max_num_seqs + plan.settings.max_queued_requests)
        self._num_live, self._index, self._channel = plan.num_live, index, channel
        self._to_send: FromFront | None = None
        self._stats: asyncio.Future[dict[str, Any]] | None = None  # that were asked for

    async def start(self) -> None:
        self._engine_loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="nanovllm-channel", daemon=True).start()

    def _start(self, request: CompletionRequest, name: str) -> AsyncRequest:
        started = FrontRequest(request, name)
        self.next_message().requests.append(encode_request(started.message()))  # an error is this request's own
        return started

    def _drop(self, request: AsyncRequest) -> None:
        self.next_message().discarded.append(request.request_id)

    def _abort(self, request: AsyncRequest) -> None:
        self.next_message().aborted.append(request.request_id)

    async def stats(self) -> list[dict[str, Any] | None]:
        self.check_open()
        self.next_message().wants_stats = True
        self._stats = self._stats or asyncio.get_running_loop().create_future()
        return [await asyncio.shield(self._stats)]  # who asked may go away

    def next_message(self) -> FromFront:
        """What is sent at the end of this turn."""
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

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """A thread of its own waits for messages."""
        try:
            while True:
                self._engine_loop.call_soon_threadsafe(self._receive, self._channel.receive())
        except OSError:
            if not self._is_closing:
                self._engine_loop.call_soon_threadsafe(self._lose, "its process has ended")

    def _receive(self, data: bytes) -> None:
        try:
            message = decode_from_engine(data)
        except DecodeError as error:  # nobody is to wait for what it said
            self._lose(f"its message can't be read: {error}")
            return
        self._deliver(message.deltas, message.finals)
        for request_id, kind, text in message.errors:
            if (request := self._live.get(request_id)) is not None:
                self._forget(request)
                request.fail(ERRORS.get(kind, RuntimeError)(text))
        if message.stats and self._stats is not None:
            self._stats.set_result(message.stats)
            self._stats = None
        if message.failure:
            self._lose(message.failure)

    def _lose(self, problem: str) -> None:
        """The engine has failed, or its process has ended."""
        if self.error is None and not self._is_closing:
            self._fail(RuntimeError(problem))
            self._fail_all()
            if self._stats is not None:
                self._stats.set_exception(RuntimeError(problem))

    def exit(self) -> None:
        super().exit()
        self._channel.close()


def run_front(plan: FrontPlan, index: int, channel: socket.socket) -> None:
    """The whole life of a front's process."""
    os.setpgid(0, 0)  # Ctrl-C reaches the engine's process alone, which lets the fronts drain
    set_up_process()
    llm = FrontClient(plan, index, Channel(channel))
    with plan.listener or listening_socket(plan.settings, is_of_front=True) as listener:
        try:
            status = run_server(llm, plan.settings, plan.model, listener, llm.next_message)
        finally:
            llm.exit()
    sys.exit(status)

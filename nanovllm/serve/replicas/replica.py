"""Defines a replica: an engine that receives requests and reports results in messages. A replica may be a Ray actor."""

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanovllm.engine.collector import StepOutput
from nanovllm.engine.features import FEATURES
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.stats import stats_of
from nanovllm.llm import LLM
from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_request import pooling_request
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.async_request import merged
from nanovllm.serve.notifying_collector import NotifyingCollector
from nanovllm.serve.replicas.messages import Final, NewRequest, Report, decode_requests, encode_report, make_final

logger = logging.getLogger("nanovllm")


class Replica:
    """An engine that is controlled by messages.

    Ray first calls `start` and `reports`, then the methods that the driver calls. The engine's thread runs the engine's
    steps, and never waits for reports. A separate thread runs `reports`. Each report contains everything that has
    happened since the previous report, which may be several steps. This file does not import Ray, so that tests can run
    replicas without Ray.
    """

    orders_by_id = True  # one driver assigns ids in order of submission, so a moved request keeps its place

    def start(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load the model. Return what the driver must know about the engine. Raises the same errors as `LLM`."""
        self.attach(LLM(model, **settings))
        config = self.engine.config
        num_blocks = config.num_kvcache_blocks if config.enable_prefix_caching else 0  # of the prefix cache
        return {"num_blocks": num_blocks, "startup_seconds": self.engine.startup_seconds}

    def attach(self, engine: LLM) -> None:
        """Use an engine that is already loaded. Several replicas can share the engine if all request ids are unique."""
        self.engine, self._engine_thread = engine, engine.engine_thread
        self._collectors = {kind: NotifyingCollector(kind, self._notify, self._fail) for kind in OutputKind}
        self._requests: dict[int, CompletionRequest] = {}  # by the driver's id
        self._num_unfinished: dict[int, int] = {}  # by request id: the number of answers that have not ended
        self._changed = threading.Condition()  # protects the following attributes
        self._errors: list[tuple[int, Exception]] = []
        self._failure: BaseException | None = None
        self.is_closed = False
        self._in_grammar_thread: set[int] = set()  # ids of requests that wait for their grammars
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-grammar")
        self._engine_thread.watch(self._collectors[OutputKind.DELTA])

    def submit(self, data: bytes) -> None:
        """Queue requests that the driver has checked.

        If a request has an error, the error is reported. Other requests are not affected.
        """
        try:
            self._submit(decode_requests(data))
        except Exception as error:  # the driver ignores the result of this call, so `reports` raises the error
            self._fail(error)
            raise

    def _submit(self, messages: Iterable[NewRequest]) -> None:
        """Queue requests. Grammars compile slowly, so another thread queues requests with `structured_outputs`."""
        plain = []
        for new in messages:
            if new.params.structured_outputs is None:
                plain.append(new)
            else:
                self._in_grammar_thread.add(new.request_id)
                self._grammar_thread.submit(self._queue, [new])
        self._queue(plain)

    def _queue(self, messages: list[NewRequest]) -> None:
        requests = []
        for new in messages:
            try:
                requests.append(self._make_request(new))
            except Exception as error:
                self._report_error(new.request_id, error)
        with self._changed:
            for request in requests:
                self._requests[request.request_id] = request
                self._num_unfinished[request.request_id] = len(request.group)
        try:
            for request in requests:
                self._engine_thread.submit([request], self._collectors[request.kind])
        except RuntimeError as error:
            self._fail(error)
        self._in_grammar_thread.difference_update([new.request_id for new in messages])

    def _report_error(self, request_id: int, error: Exception) -> None:
        with self._changed:
            self._errors.append((request_id, error))
            self._changed.notify()

    def discard(self, request_ids: Iterable[int]) -> None:
        """Drop requests. They get no output."""
        request_ids = [*request_ids]
        if late := self._in_grammar_thread.intersection(request_ids):
            self._grammar_thread.submit(self.discard, late)  # after that thread has made the requests
        self._engine_thread.discard([i for i in request_ids if i not in late and self._forget(i)])

    def abort(self, request_id: int) -> None:
        """End a request early. The caller gets the tokens generated so far."""
        if request_id in self._in_grammar_thread:
            self._grammar_thread.submit(self.abort, request_id)
        else:
            self._engine_thread.abort(request_id)

    def stats(self) -> dict[str, Any]:
        return stats_of(self.engine.scheduler)

    def reports(self) -> Iterator[bytes]:
        for report in self.new_reports():  # not `yield from`: Ray calls `send`, which `map` does not have
            yield encode_report(report)

    def new_reports(self) -> Iterator[Report]:
        """Yield a report whenever there is news. Raises RuntimeError if the engine fails."""
        while True:
            with self._changed:
                while not (self._errors or self._failure or any(x.is_ready for x in self._collectors.values())):
                    self._changed.wait()
                if self._failure is not None:
                    raise RuntimeError(f"the engine has failed: {self._failure!r}") from self._failure
                errors, self._errors = self._errors, []
            # do this without the lock, because the engine's thread would wait for the lock
            outputs = StepOutput()
            for collector in self._collectors.values():
                collector.take_into(outputs)
            yield Report(*self._read(outputs), errors)

    def exit(self) -> None:
        """End `reports` and the engine. Ray does not call this method, but kills the actor's process."""
        self.close()
        self.engine.exit()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._failure = self._failure or RuntimeError("it was closed")
            self._changed.notify()
        self._grammar_thread.shutdown(wait=False)

    def _make_request(self, new: NewRequest) -> CompletionRequest:
        prompt = new.prompt(self.engine.config)
        processor = self.engine.input_processor
        request: Any
        if new.pooling is not None:
            request = pooling_request(processor, prompt, new.pooling, new.kind, new.priority)
        else:
            request = processor.request(prompt, new.params, new.kind, new.prompt_index, priority=new.priority)
        processor.with_adapters([request], new.lora_request)
        request.request_id = new.request_id
        for seq, noise_seed, generated in zip(request.group, new.noise_seeds, new.generated):
            seq.request_id, seq.noise_seed = new.request_id, noise_seed
            seq.cache_salt ^= new.cache_salt
            for token_id in generated:  # the sequence continues as after a preemption
                seq.token_ids.append(token_id)
                for name in seq.feature_state:  # one token at a time: stop strings do not count before `min_tokens`
                    FEATURES[name].load().after_step(ScheduledStep(), {0: seq}, {}, None)
            if seq.awaited is not None:
                seq.awaited.result()
                seq.awaited = None
            seq.num_tokens = len(seq.token_ids)
        if self.orders_by_id:
            processor.set_order(*request.group)
        return request

    def _read(self, outputs: StepOutput) -> tuple[list[StreamEvent], list[Final]]:
        """Return one merged delta per answer, and a Final for each request that has ended."""
        deltas: list[StreamEvent] = []
        finals: list[Final] = []
        events: dict[int, list[StreamEvent]] = {}
        for event in outputs.events:
            events.setdefault(event.request_id, []).append(event)
        for request_id, request_events in events.items():
            if (request := self._requests.get(request_id)) is not None:
                deltas += merged(request_events)
                num_ended = len([event for event in request_events if event.finish_reason is not None])
                if num_ended and self._end_answers(request_id, num_ended):
                    seq, output_logprobs = request.group[0], request.logprobs
                    logprobs = None if output_logprobs is None else output_logprobs.of_prompt(seq)
                    finals.append(make_final(request_id, [], seq.num_cached_tokens, logprobs, request.metrics()))
        for output in outputs.finished:
            if self._forget(i := output.request_id):
                if isinstance(output, PoolingOutput):
                    logprobs, data = None, None if output.data is None else output.data.tobytes()
                else:
                    logprobs, data = output.prompt_logprobs, None
                finals.append(make_final(i, output.outputs, output.num_cached_tokens, logprobs, output.metrics, data))
        return deltas, finals

    def _end_answers(self, request_id: int, count: int) -> bool:
        """Record that `count` more answers of a request have ended. Return True if all answers have ended."""
        with self._changed:
            if request_id not in self._num_unfinished:  # it was discarded
                return False
            self._num_unfinished[request_id] -= count
            return not self._num_unfinished[request_id] and self._forget(request_id)

    def _forget(self, request_id: int) -> bool:
        """Forget a request. Return False if the request has already ended or was discarded."""
        with self._changed:
            self._num_unfinished.pop(request_id, None)
            return self._requests.pop(request_id, None) is not None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error.__cause__ or error
                logger.error("the engine has failed: %s", self._failure, exc_info=self._failure)
            self._changed.notify()

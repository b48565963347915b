"""From the result of a step to the outputs of requests."""

from collections.abc import Collection

from nanovllm.engine.output_collector import OutputCollector
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.request import Request
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_result import StepResult


class OutputProcessor:
    """Gives tokens to their sequences, ends sequences, and hands outputs to the collectors of the callers."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}  # by id, those that have not ended
        self._watching: set[int] = set()  # ids of those that look at each token
        self.collectors: set[OutputCollector] = set()  # of those requests

    @property
    def is_offline(self) -> bool:
        """Whether one caller alone waits, and for complete answers, so that nobody sees when a token arrives."""
        kinds = [collector.kind for collector in [*self.collectors]]
        return kinds == [OutputKind.FINAL_ONLY]

    def add(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            if not request.only_final:
                self._watching.add(request.request_id)
            request.collector.live.add(request.request_id)
            self.collectors.add(request.collector)
            self.scheduler.add(*request.group)

    def process(self, step: ScheduledStep, result: StepResult) -> None:
        """Apply the result of a step. Without a request that looks at each token, only a few sequences are visited."""
        changed: dict[int, Request] = {}
        ended = self.scheduler.postprocess(step, *result)
        if step.constrained:
            # a room of its own, which few requests need
            from nanovllm.structured_outputs.constraint import advance_constraints

            advance_constraints(step.constrained, self.scheduler)
        visited = step.sampled_seqs if self._watching else [*(step.sampled_seqs[i] for i in step.visited), *ended]
        for seq in visited:
            if (request := self.requests.get(seq.request_id)) is None:
                continue  # it ended while this token was in flight
            if not request.only_final:
                request.process_token(seq, self.scheduler)
            if seq.finish_reason is not None or seq.is_beam:
                changed[seq.request_id] = request
        for request in changed.values():
            request.advance(self.scheduler)
            if request.is_finished:
                self._finish(request)
        num_prefilled = sum(end - start for _, start, end in step.chunks)
        for collector in [*self.collectors]:
            self._hand_over(collector, num_prefilled, step.num_decodes)

    def abort(self, request_id: int) -> None:
        """End a request, if it has not ended, with the tokens that it has."""
        if (request := self.requests.get(request_id)) is not None:
            self.scheduler.abort(request_id)
            for seq in request.group:
                request.deliver(seq)
            self._finish(request)
            self._hand_over(request.collector)

    def discard(self, request_ids: Collection[int]) -> None:
        """End requests whose caller has stopped waiting: no output is made."""
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self.scheduler.abort(request_id)
                self._forget(request)
                self._hand_over(request.collector)

    def reset(self) -> None:
        """Forget all requests and sequences, without an output. The EngineThread tells their collectors."""
        self.requests.clear()
        self._watching.clear()
        self.scheduler.reset()

    def _finish(self, request: Request) -> None:
        """Its last sequence has ended."""
        if request.kind is not OutputKind.DELTA:
            request.collector.new.finished.append(request.output())
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._watching.discard(request.request_id)
        request.collector.end(request.request_id)

    def _hand_over(self, collector: OutputCollector, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        collector.put(num_prefill_tokens, num_decode_tokens)
        if not collector.live:
            self.collectors.discard(collector)

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
        self.collectors: set[OutputCollector] = set()  # of those requests

    @property
    def is_offline(self) -> bool:
        """Whether one caller alone waits, and for complete answers, so that nobody sees when a token arrives."""
        kinds = [collector.kind for collector in [*self.collectors]]
        return kinds == [OutputKind.FINAL_ONLY]

    def add(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            request.collector.live.add(request.request_id)
            self.collectors.add(request.collector)
            self.scheduler.add(*request.group)

    def process(self, step: ScheduledStep, result: StepResult) -> None:
        """Apply the result of a step."""
        live = [seq for seq in step.sampled_seqs if seq.finish_reason is None]
        num_decoded = sum(seq.finish_reason is None for seq in step.sampled_seqs[: step.num_decodes])
        changed: dict[int, Request] = {}
        self.scheduler.postprocess(step, *result)
        if step.constrained:
            # a room of its own, which few requests need
            from nanovllm.structured_outputs.constraint import advance_constraints

            advance_constraints(step.constrained, self.scheduler)
        for seq in live:
            request = self.requests[seq.request_id]
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
            self._hand_over(collector, num_prefilled, num_decoded)

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
            if (request := self.requests.pop(request_id, None)) is not None:
                self.scheduler.abort(request_id)
                request.collector.end(request_id)
                self._hand_over(request.collector)

    def _finish(self, request: Request) -> None:
        """Its last sequence has ended."""
        if request.kind is not OutputKind.DELTA:
            request.collector.new.finished.append(request.output())
        del self.requests[request.request_id]
        request.collector.end(request.request_id)

    def _hand_over(self, collector: OutputCollector, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        collector.put(num_prefill_tokens, num_decode_tokens)
        if not collector.live:
            self.collectors.discard(collector)

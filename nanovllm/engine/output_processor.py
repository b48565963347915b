"""Makes the outputs of requests from the results of steps."""

from collections.abc import Collection

from nanovllm.engine.awaiting import resume_done
from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.requests.request import Request


class OutputProcessor:
    """Makes outputs from new tokens and ended sequences, and puts them into the callers' collectors."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}  # unfinished requests by id
        self.collectors: set[OutputCollector] = set()  # of these requests

    @property
    def serves_one_batch(self) -> bool:
        """Whether there is only one caller, who waits for complete answers."""
        return [collector.kind for collector in self.collectors] == [OutputKind.FINAL_ONLY]

    def add(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            for seq in request.group:
                seq.is_watched |= seq.waits_for_token or request.kind is not OutputKind.FINAL_ONLY
            request.collector.live.add(request.request_id)
            self.collectors.add(request.collector)
            self.scheduler.add(*request.group)

    def process(self, step: ScheduledStep, result: StepResult, changed: Collection[Sequence]) -> None:
        """Deliver a step's outputs to the callers. `changed` comes from `Scheduler.postprocess`."""
        num_prefilled = sum(step.chunk_lens)
        num_decoded = step.num_decodes if result.counts is None else sum(result.counts[: step.num_decodes])
        for collector in self.collectors:
            collector.new.num_prefill_tokens += num_prefilled
            collector.new.num_decode_tokens += num_decoded
        self._deliver(changed)

    def release_held(self) -> None:
        self._deliver(resume_done(self.scheduler))

    def _deliver(self, seqs: Collection[Sequence]) -> None:
        """Tell the requests of `seqs` about new tokens, pauses and ends. Hand the outputs to all callers."""
        changed: dict[int, Request] = {}
        for seq in seqs:
            request = self.requests[seq.request_id]
            if request.kind is not OutputKind.FINAL_ONLY:
                request.deliver(seq)
            if seq.finish_reason is not None or seq.is_paused:
                changed[seq.request_id] = request
        for request in changed.values():
            request.advance(self.scheduler)
            if request.is_finished:
                self._finish(request)
        for collector in [*self.collectors]:
            self._hand_over(collector)

    def abort(self, request_id: int) -> None:
        if (request := self.requests.get(request_id)) is not None:
            for seq in self.scheduler.abort(request_id):
                request.deliver(seq)
            self._finish(request)
            self._hand_over(request.collector)

    def discard(self, request_ids: Collection[int]) -> None:
        """End requests whose caller no longer waits. No output is delivered."""
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self.scheduler.abort(request_id)
                self._forget(request)
                self._hand_over(request.collector)

    def reset(self) -> None:
        """Drop all requests and sequences, without any output. The EngineThread notifies the collectors."""
        self.requests.clear()
        self.scheduler.reset()

    def _finish(self, request: Request) -> None:
        """Put the output of an ended request into its collector, and forget the request."""
        if request.kind is not OutputKind.DELTA:
            request.collector.new.finished.append(request.output())
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        request.collector.end(request.request_id)

    def _hand_over(self, collector: OutputCollector) -> None:
        collector.put()
        if not collector.live:
            self.collectors.discard(collector)

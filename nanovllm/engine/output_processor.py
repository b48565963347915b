"""From the result of a step to the outputs of requests."""

from collections.abc import Collection

from nanovllm.engine.features import FEATURES, Ends
from nanovllm.engine.outputs import OutputCollector, OutputKind
from nanovllm.engine.request import Request
from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

MAX_WAIT_SECONDS = 0.02  # for a held sequence: meanwhile, callers may want something


class OutputProcessor:
    """Appends the tokens of steps to sequences, and ends sequences: nothing else does. Hands outputs to collectors."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: frozenset[int]):
        self.scheduler = scheduler
        self.eos_token_ids = eos_token_ids
        self.eos_token_id: int | None = None  # the tokenizer's own, which is not reported as a stop reason
        self.requests: dict[int, Request] = {}  # by id, those that have not ended
        self.collectors: set[OutputCollector] = set()  # of those requests
        self.awaiting: dict[Sequence, None] = {}  # those that are held until what they await is done

    @property
    def is_offline(self) -> bool:
        """Whether one caller alone waits, and for complete answers: then only the end of the last one matters."""
        return [collector.kind for collector in self.collectors] == [OutputKind.FINAL_ONLY]

    def add(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            for seq in request.group:
                seq.is_watched |= seq.waits_for_token or request.kind is not OutputKind.FINAL_ONLY
            request.collector.live.add(request.request_id)
            self.collectors.add(request.collector)
            self.scheduler.add(*request.group)

    def process(self, step: ScheduledStep, result: StepResult) -> None:
        """Give sequences the tokens of a step, and their callers what is new."""
        self._deliver(self.postprocess(step, result))
        num_prefilled = sum(step.chunk_lens)
        num_decoded = step.num_decodes if result.counts is None else sum(result.counts[: step.num_decodes])
        for collector in [*self.collectors]:
            self._hand_over(collector, num_prefilled, num_decoded)

    def postprocess(self, step: ScheduledStep, result: StepResult) -> Collection[Sequence]:
        """Append the tokens of a step, let features look at them, and end sequences.

        Returns the watched sequences that have got a token, and all that have ended.
        """
        arrived, ends = self.append(step.sampled_seqs, result.token_ids, step.watched)
        return self.run_features(step, result, arrived, ends)

    def append(
        self, seqs: list[Sequence], token_ids: list[int], watched: list[int]
    ) -> tuple[dict[int, Sequence], Ends]:
        """Append its token to each sequence that still lives, or hold the sequence, if it pauses.

        Returns the watched ones of these, by index, and those that end by the token or by their length. `watched` is a
        ScheduledStep's.
        """
        scheduler, num_late, ends = self.scheduler, 0, Ends()
        for seq, token_id in zip(seqs, token_ids, strict=True):
            if seq.finish_reason is not None:
                num_late += 1  # it ended while this token was in flight, which is not part of the answer
                continue
            if "first_token" not in seq.timing:
                seq.record_time("first_token")
            if seq.pauses:
                from nanovllm.features.forks import hold  # beams alone pause

                hold(scheduler, seq)
                continue
            seq.append_token(token_id)
            scheduler.block_manager.cache_full_blocks(seq)
            if reasons := seq.finish_reasons(self.eos_token_ids, self.eos_token_id):
                ends[seq] = reasons
        scheduler.totals["output_tokens"] += len(seqs) - num_late
        return {i: seqs[i] for i in watched if seqs[i].finish_reason is None}, ends

    def run_features(
        self, step: ScheduledStep, result: StepResult, arrived: dict[int, Sequence], ends: Ends
    ) -> Collection[Sequence]:
        """Let features look at the tokens that have `arrived`, as `StepFeature.after_step` says, and end sequences."""
        for name in [*FEATURES]:  # another thread may register one meanwhile
            if name in step.feature_names:
                FEATURES[name].load().after_step(step, arrived, ends, result.feature_results.get(name))
        for seq, reasons in ends.items():
            self.end(seq, *reasons)
        for seq in arrived.values():
            if seq.awaited is not None and seq.finish_reason is None:
                from nanovllm.features.awaiting import hold  # few features need time

                hold(self.scheduler, self.awaiting, seq)
            seq.limit_tokens()
        return dict.fromkeys([*arrived.values(), *ends]) if ends else arrived.values()

    def release(self) -> None:
        """Let held sequences go on, or end them, if what they await is done. If all are held, wait for one of them."""
        from nanovllm.features.awaiting import release

        are_all = len(self.awaiting) == sum(map(len, self.scheduler.live.values()))
        ends = release(self.scheduler, self.awaiting, MAX_WAIT_SECONDS if are_all else 0)
        for seq, reasons in ends.items():
            self.end(seq, *reasons)
        self._deliver(ends)
        for collector in [*self.collectors]:
            self._hand_over(collector)

    def _deliver(self, seqs: Collection[Sequence]) -> None:
        """Tell the requests of these sequences, which have got a token, have paused or have ended."""
        changed: dict[int, Request] = {}
        for seq in seqs:
            request = self.requests[seq.request_id]
            if request.kind is not OutputKind.FINAL_ONLY:
                request.deliver(seq)
            if seq.finish_reason is not None or seq.is_paused:
                changed[seq.request_id] = request
        for request in changed.values():
            request.advance(self)
            if request.is_finished:
                self._finish(request)

    def end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence in any state."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self.scheduler.finish(seq)
        self.awaiting.pop(seq, None)
        for name in seq.feature_state:
            FEATURES[name].load().forget(seq)

    def end_all(self, request_id: int) -> list[Sequence]:
        """End what is left of a request, and return it."""
        seqs = [*self.scheduler.live.get(request_id, {}).values()]
        for seq in seqs:
            self.end(seq, "abort")
        return seqs

    def abort(self, request_id: int) -> None:
        """End a request, if it has not ended, with the tokens that it has."""
        if (request := self.requests.get(request_id)) is not None:
            for seq in self.end_all(request_id):
                request.deliver(seq)
            self._finish(request)
            self._hand_over(request.collector)

    def discard(self, request_ids: Collection[int]) -> None:
        """End requests whose caller has stopped waiting: no output is made."""
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self.end_all(request_id)
                self._forget(request)
                self._hand_over(request.collector)

    def reset(self) -> None:
        """Forget all requests and sequences, without an output. The EngineThread tells their collectors."""
        self.requests.clear()
        self.scheduler.reset()
        for seq in self.awaiting:
            seq.awaited.cancel()
        self.awaiting.clear()

    def _finish(self, request: Request) -> None:
        """Hand over the output of a request whose last sequence has ended, and forget the request."""
        if request.kind is not OutputKind.DELTA:
            request.collector.new.finished.append(request.output())
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        request.collector.end(request.request_id)

    def _hand_over(self, collector: OutputCollector, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        collector.put(num_prefill_tokens, num_decode_tokens)
        if not collector.live:
            self.collectors.discard(collector)

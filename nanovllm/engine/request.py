"""Requests between a caller and the scheduler: text is made here, and what arrives is kept for whoever asked."""

import threading
from collections import deque
from enum import Enum, auto
from time import perf_counter, time

from nanovllm.engine.detokenizer import Detokenizer, TokenTexts, Vocabulary
from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StepOutput, StreamEvent
from nanovllm.engine.sequence import Sequence


class OutputKind(Enum):
    """What a caller is told before its requests have ended."""

    ANSWERS = auto()  # nothing
    EVENTS = auto()
    TOKENS = auto()


class Inbox:
    """What has arrived for one caller, a StepOutput a step. The leader of the step writes, the caller's thread reads."""

    def __init__(self, wants: OutputKind):
        self.wants = wants
        self.live: set[int] = set()  # ids of requests that have not ended
        self.is_ready = False  # something has come that the caller may wait for
        self.failure: BaseException | None = None  # that ended its requests
        self.thread = threading.current_thread()
        self.is_read = False  # by `step` in its own thread
        self.ended: set[int] = set()  # of the live ones, those that this step has ended
        self._outputs: deque[StepOutput] = deque()
        self._begin()

    def _begin(self) -> None:
        self.finished: list[RequestOutput] = []
        self.new_tokens: list[tuple[int, int]] = []
        self.events: list[StreamEvent] = []

    def end_step(self, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        """What was gathered is an output now."""
        output = StepOutput(self.finished, self.new_tokens, self.events, num_prefill_tokens, num_decode_tokens)
        self._begin()
        self._outputs.append(output)
        if output.finished or output.new_tokens or output.events:
            self.is_ready = True
        self.live.difference_update(self.ended)  # last, as whoever sees none alive looks for no more outputs
        self.ended.clear()

    def drop(self, error: BaseException | None) -> None:
        """Its requests are gone; `take` is to raise if that is for an error."""
        self._begin()
        self.failure = error
        self.is_ready = error is not None
        self.live.clear()
        self.ended.clear()

    def take(self) -> list[StepOutput]:
        """All that has come since the last call; once that was taken, RuntimeError if the requests were dropped."""
        self.is_ready = False
        outputs = [self._outputs.popleft() for _ in range(len(self._outputs))]
        if (error := self.failure) is not None:
            if any(output.finished or output.events for output in outputs):
                self.is_ready = True
                return outputs
            self.failure = None
            raise RuntimeError(f"a step failed that another caller ran, and with it all requests: {error!r}") from error
        return outputs


class Request:
    """A prompt, the sequences that answer it, and their text."""

    def __init__(
        self,
        group: list[Sequence],
        prompt: str | None,
        inbox: Inbox,
        vocabulary: Vocabulary,
        all_tokens: Vocabulary,
        index: int = 0,
    ):
        """`vocabulary` gives the text of answers, `all_tokens` that of single tokens; `index` is the prompt's in its call."""
        self.request_id = group[0].request_id
        self.group, self.prompt, self.inbox, self.index = group, prompt, inbox, index
        self.params = group[0].params
        self.is_quiet = inbox.wants is OutputKind.ANSWERS and not self.params.stop
        self._vocabulary, self._all_tokens = vocabulary, all_tokens
        self._detokenizers: dict[int, Detokenizer] = {}  # by the sequence's index
        self._num_told = [0] * len(group)  # tokens that events have brought
        self._token_texts = [TokenTexts(all_tokens) for _ in group]  # behind those
        self._told_ends: set[int] = set()  # sequences whose last event was made

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason for seq in self.group)

    def cut_at_stop(self, seq: Sequence) -> str | None:
        """The stop string that the last token of `seq` completes; its text ends there."""
        return self._detokenizer(seq).cut_at_stop() if self.params.stop else None

    def tell(self, seq: Sequence) -> None:
        """Put into the inbox what is new of `seq`; nothing, if that was its last event already."""
        if seq.index in self._told_ends:
            return
        if seq.finish_reason is not None:
            self._told_ends.add(seq.index)
        told, self._num_told[seq.index] = self._num_told[seq.index], len(seq.token_ids) - seq.num_prompt_tokens
        token_ids = seq.token_ids[seq.num_prompt_tokens + told :]
        if self.inbox.wants is OutputKind.TOKENS:
            self.inbox.new_tokens += [(self.request_id, token_id) for token_id in token_ids]
        elif self.inbox.wants is OutputKind.EVENTS:
            is_over = seq.finish_reason is not None
            text = self._detokenizer(seq).take(self._num_hidden(seq), is_over) if self.params.detokenize else ""
            logprobs = self._with_text(seq.logprobs[told:], self._token_texts[seq.index]) if seq.logprobs else None
            reasons = seq.finish_reason, seq.stop_reason
            self.inbox.events.append(
                StreamEvent(self.index, seq.index, self.request_id, text, token_ids, *reasons, logprobs)
            )

    def output(self) -> RequestOutput:
        """The answers as far as they are there."""
        first, prompt_logprobs = self.group[0], None
        if self.params.prompt_logprobs is not None:
            texts = TokenTexts(self._all_tokens)
            texts.take(first.token_ids[0])
            prompt_logprobs = [None, *self._with_text(first.prompt_logprobs[1:], texts)]
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.token_ids[: first.num_prompt_tokens],
            [*map(self._completion, self.group)],
            self.is_finished,
            first.num_cached_tokens,
            prompt_logprobs,
            self._metrics(),
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        token_ids, text, logprobs, total = seq.completion_token_ids, "", None, None
        if self.params.detokenize and token_ids:
            detokenizer = self._detokenizer(seq)
            detokenizer.extend(self._num_hidden(seq), seq.finish_reason is not None)
            text = detokenizer.text
        if self.params.logprobs is not None:
            logprobs = self._with_text(seq.logprobs, TokenTexts(self._all_tokens))
            total = sum(found[i].logprob for i, found in zip(token_ids, logprobs))
        return CompletionOutput(seq.index, text, token_ids, total, logprobs, seq.finish_reason, seq.stop_reason)

    def _detokenizer(self, seq: Sequence) -> Detokenizer:
        if (found := self._detokenizers.get(seq.index)) is None:
            found = Detokenizer(seq.token_ids, seq.num_prompt_tokens, seq.params, self._vocabulary)
            self._detokenizers[seq.index] = found
        return found

    @staticmethod
    def _num_hidden(seq: Sequence) -> int:
        """Tokens at the end that are no part of the text: an end-of-sequence or stop id."""
        ended_by_id = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        return int(ended_by_id and not seq.params.include_stop_str_in_output)

    def _with_text(self, logprobs: list[dict], texts: TokenTexts) -> list[dict[int, Logprob]]:
        """Of each token, which is the first in its dict, and the most likely ones in its place."""
        made = []
        for found in logprobs:
            text_of = texts.take(next(iter(found)), found) if self.params.detokenize else {}
            made.append({i: Logprob(*value, text_of.get(i)) for i, value in found.items()})
        return made

    def _metrics(self) -> RequestMetrics:
        arrival = time() - (perf_counter() - self.group[0].arrival)
        seconds = self.group[0].timing
        if len(self.group) > 1:  # of several answers the first, and the last
            known = [seq.timing for seq in self.group]
            picks = (("scheduled", min), ("first_token", min), ("finished", max))
            seconds = {
                event: pick(t[event] for t in known if event in t)
                for event, pick in picks
                if any(event in t for t in known)
            }
        times = [seconds.get(event) for event in ("scheduled", "first_token", "finished")]
        return RequestMetrics(arrival, *[None if t is None else arrival + t for t in times])

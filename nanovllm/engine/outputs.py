"""What comes out of the engine: plain data that no later step changes. The lists in it are the caller's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import NamedTuple

from tqdm import tqdm

from nanovllm.utils.interrupts import interrupts_held


class Record(Mapping):
    """A frozen dataclass whose fields can be read by key as well, and which compares like a dict."""

    __slots__ = ()

    def __getitem__(self, key: str):
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


class Logprob(NamedTuple):
    """The log-probability of a token; its rank among all, from 1; and its text, unless `detokenize` is off."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True, eq=False)
class CompletionOutput(Record):
    """One answer to a prompt.

    token_ids: what was generated, the end-of-sequence id included.
    cumulative_logprob: the sum over `token_ids`, where log-probabilities were asked for.
    logprobs: for each token of `token_ids`, by token id: the token itself, then the most likely ones.
    finish_reason: "stop", "length" or "abort".
    stop_reason: the stop string or id that ended it; None for the tokenizer's own end-of-sequence id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, eq=False)
class RequestMetrics(Record):
    """When things happened, in seconds since the epoch; None for what never did."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computes the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput(Record):
    """The answers to one request; the fields of the first can be read here as well, by attribute or key: `out["text"]`.

    prompt: as text, where it came as text.
    prompt_logprobs: for each token of the prompt, as in `CompletionOutput.logprobs`; None for the first.
    num_cached_tokens: of the prompt, found in the prefix cache.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    metrics: RequestMetrics

    text = property(lambda self: self.outputs[0].text)
    token_ids = property(lambda self: self.outputs[0].token_ids)
    cumulative_logprob = property(lambda self: self.outputs[0].cumulative_logprob)
    logprobs = property(lambda self: self.outputs[0].logprobs)
    finish_reason = property(lambda self: self.outputs[0].finish_reason)
    stop_reason = property(lambda self: self.outputs[0].stop_reason)

    def __getitem__(self, key: str):
        if key in self.__dataclass_fields__ or key in CompletionOutput.__dataclass_fields__:
            return getattr(self, key)
        raise KeyError(key)


@dataclass(frozen=True, slots=True, eq=False)
class BeamOutput(Record):
    """One beam; `score` is `cumulative_logprob` over the number of its tokens to the power `length_penalty`."""

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class BeamSearchOutput(Record):
    """The beams that a search found, the best first; those of one that was aborted, not `finished`, may be fewer or none."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[BeamOutput]
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class StreamEvent(Record):
    """What is new of one answer; `finish_reason` is None until the last event of each.

    index: of the prompt in the call. output_index: of the answer among the prompt's `n`.
    text: what can't be cut off as a stop string any more. logprobs: of `token_ids`, where they were asked for.
    """

    index: int
    output_index: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None


class StepOutput(NamedTuple):
    """What one turn of the loop brought to a caller.

    finished: of the requests that ended. events: of streams, piece by piece.
    new_tokens: (request id, token id) of every token that arrived, in the loop of `LLMEngine.step`.
    num_prefill_tokens, num_decode_tokens: of the whole step, all callers together.
    """

    finished: list[RequestOutput]
    new_tokens: list[tuple[int, int]]
    events: list[StreamEvent]
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @classmethod
    def merged(cls, outputs: list["StepOutput"]) -> "StepOutput":
        if len(outputs) == 1:
            return outputs[0]
        finished, new_tokens, events = ([*chain.from_iterable(x[i] for x in outputs)] for i in range(3))
        return cls(finished, new_tokens, events, *(sum(x[i] for x in outputs) for i in (3, 4)))


class ProgressBar(tqdm):
    """Requests that are done, and tokens per second of the last prefill and the last decode step."""

    def __init__(self, total: int):
        super().__init__(total=total, desc="Generating", dynamic_ncols=True)
        self.rates: dict[str, str] = {}
        self.last = perf_counter()

    def show(self, output: StepOutput) -> None:
        now = perf_counter()
        for kind, num_tokens in (("prefill", output.num_prefill_tokens), ("decode", output.num_decode_tokens)):
            if num_tokens:
                self.rates[kind] = f"{num_tokens / (now - self.last):.0f} tok/s"
        self.last = now
        with interrupts_held():
            self.set_postfix(self.rates, refresh=False)
            self.update(len(output.finished))


@contextmanager
def progress_bar(total: int, disable: bool):
    """A function that shows a StepOutput. An interrupt would leave tqdm's lock, which all of the process share, taken."""
    if disable:
        yield lambda output: None
        return
    with interrupts_held():
        bar = ProgressBar(total)
    try:
        yield bar.show
    finally:
        with interrupts_held():
            bar.close()

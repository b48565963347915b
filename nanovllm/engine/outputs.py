"""What the engine returns: plain data that no later step changes. The lists in it belong to the caller."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar, NamedTuple

from tqdm import tqdm

from nanovllm.utils.interrupts import interrupts_held


class Record(Mapping):
    """A frozen dataclass whose fields can also be read by key, and which compares like a dict."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict]

    def __getitem__(self, key: str):
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


class Logprob(NamedTuple):
    """The log-probability of a token, its rank in the vocabulary (from 1), and its text unless `detokenize` is off."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True, eq=False)
class CompletionOutput(Record):
    """One answer to a prompt.

    token_ids: the generated tokens, including the end-of-sequence id.
    cumulative_logprob: the sum over `token_ids`, if the request has `logprobs`.
    logprobs: for each token of `token_ids` a dict by token id: first the token itself, then the most likely tokens.
    finish_reason: "stop", "length" or "abort".
    stop_reason: the stop string or id that ended it; None for the tokenizer's own end-of-sequence id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, eq=False)
class RequestMetrics(Record):
    """Times in seconds since the epoch; None for what did not happen."""

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
    """The answers to one request. The fields of the first answer can be read here too, by attribute or by key.

    prompt: the text, if it was passed as text.
    prompt_logprobs: for each token of the prompt, as in `CompletionOutput.logprobs`; None for the first token.
    num_cached_tokens: how many tokens of the prompt were found in the prefix cache.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    def __getitem__(self, key: str):
        return Record.__getitem__(self.outputs[0] if key in CompletionOutput.__dataclass_fields__ else self, key)


@dataclass(frozen=True, slots=True, eq=False)
class BeamOutput(Record):
    """One beam; `score` is `cumulative_logprob` over the number of its tokens to the power `length_penalty`."""

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class BeamSearchOutput(Record):
    """The beams that a search found, the best first. An aborted search, not `finished`, may have fewer or none."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[BeamOutput]
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class StreamEvent(Record):
    """The next piece of one answer. `finish_reason` is None in all events of an answer but the last.

    index: of the prompt in the call. output_index: of the answer among the prompt's `n`.
    text: without an end that may yet be cut off as part of a stop string.
    logprobs: of `token_ids`, if the request has `logprobs`.
    """

    index: int
    output_index: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(slots=True)
class StepOutput:
    """What one call of `LLMEngine.step` returns: the outputs of one step, or of several that other threads have run.

    finished: of the requests that ended.
    new_tokens: (request id, token id) of every token that arrived, in the order of arrival.
    events: of streams; empty from `LLMEngine.step`.
    num_prefill_tokens, num_decode_tokens: computed in those steps, for all callers together.
    """

    finished: list[RequestOutput] = field(default_factory=list)
    new_tokens: list[tuple[int, int]] = field(default_factory=list)
    events: list[StreamEvent] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def add(self, other: "StepOutput") -> None:
        self.finished += other.finished
        self.new_tokens += other.new_tokens
        self.events += other.events
        self.num_prefill_tokens += other.num_prefill_tokens
        self.num_decode_tokens += other.num_decode_tokens


@contextmanager
def progress_bar(total: int, disable: bool) -> Iterator[Callable[[StepOutput], None]]:
    """A function that shows a StepOutput: the number of finished requests, and the rates of the last steps.

    Interrupts are held while tqdm works: one that came there would leave its lock taken, for the whole process.
    """
    if disable:
        yield lambda output: None
        return
    rates, last = {}, perf_counter()

    def show(output: StepOutput) -> None:
        nonlocal last
        now = perf_counter()
        for kind, num_tokens in (("prefill", output.num_prefill_tokens), ("decode", output.num_decode_tokens)):
            if num_tokens:
                rates[kind] = f"{num_tokens / (now - last):.0f} tok/s"
        last = now
        with interrupts_held():
            bar.set_postfix(rates, refresh=False)
            bar.update(len(output.finished))

    with interrupts_held():
        bar = tqdm(total=total, desc="Generating", dynamic_ncols=True)
    try:
        yield show
    finally:
        with interrupts_held():
            bar.close()

"""The outputs that callers get, and the collectors, which store outputs until a caller takes them.

Output records are frozen. The caller may change lists in output records, because the engine no longer uses the lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, ClassVar, NamedTuple


class OutputKind(Enum):
    """Which outputs a caller gets."""

    FINAL_ONLY = auto()  # one output when a request ends
    DELTA = auto()  # an event for each new piece of an answer
    TOKENS = auto()  # every token id, and one output when a request ends


class Record(Mapping):
    """The base class of the output records. Fields can be read as attributes or by key.

    Subclasses set `eq=False`, so that a record equals a dict with the same items.
    """

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
    """A token's log-probability, rank (1 for the most likely token) and text (None without `detokenize`)."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True, eq=False)
class CompletionOutput(Record):
    """One answer to a prompt.

    index: the index of this answer among the `n` answers to its request.
    token_ids: the generated tokens, including the end-of-sequence or stop id that ended the answer.
    cumulative_logprob: the sum of the log-probabilities of `token_ids`; None unless the request sets `logprobs`.
    logprobs: for each token, a dict that maps token ids to Logprobs. The generated token comes first, then the most
        likely tokens. This field is None if the request does not set `logprobs`.
    finish_reason: one of "stop", "length", "abort" and "error" (if `structured_outputs` allows no next token).
    stop_reason: the stop string or id that ended the answer, or the message of an "error". `stop_reason` is None for
        "length", for "abort", and if the tokenizer's end-of-sequence id ended the answer. Other end-of-sequence ids of
        the model are reported as `stop_reason`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Sequence[dict[int, Logprob]] | None  # made when it is first read
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, eq=False)
class RequestMetrics(Record):
    """The times of a request's events, in seconds since the epoch.

    If an abort prevented an event, the event's time is None. If there are several answers, `finished_time` belongs to
    the last answer. Every other field is the earliest time of any answer.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput(Record):
    """The answers to one request. `output.text` and `output["text"]` read fields of the first answer.

    prompt: the prompt's text, with the chat template applied; None if the caller passed only token ids.
    outputs: the `n` answers.
    num_cached_tokens: how many prompt tokens were found in the prefix cache.
    prompt_logprobs: a dict for each prompt token, as in `CompletionOutput.logprobs`, and None for the first token.
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
    def logprobs(self) -> Sequence[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    def __getitem__(self, key: str):
        owner = self.outputs[0] if key in CompletionOutput.__dataclass_fields__ else self
        return Record.__getitem__(owner, key)

    def __iter__(self) -> Iterator[str]:
        """Make `dict(output)` return {"text": ..., "token_ids": ...}."""
        return iter(("text", "token_ids"))

    def __len__(self) -> int:
        return 2


@dataclass(slots=True)
class StepOutput:
    """The new outputs for one caller from one or more steps.

    A StepOutput unpacks into a pair, as in `outputs, num_tokens = llm.step()`. `outputs` contains a pair (request id,
    token ids) for each ended request. `num_tokens` is the number of computed prompt tokens. If no prompt tokens were
    computed, `num_tokens` is the number of decoded tokens, negated.

    finished: the outputs of the requests that ended.
    new_tokens: (request id, token id) for every new token, in the order of arrival. Only callers that use `step` get
        `new_tokens`.
    events: a `stream_event.StreamEvent` for each new piece of an answer, if the caller uses `stream`.
    num_prefill_tokens, num_decode_tokens: how many tokens these steps computed, for all callers together.
    """

    finished: list[RequestOutput] = field(default_factory=list)
    new_tokens: list[tuple[int, int]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def __iter__(self) -> Iterator[Any]:
        yield [(output.request_id, output.token_ids) for output in self.finished]
        yield self.num_prefill_tokens or -self.num_decode_tokens

    def __getitem__(self, index: int) -> Any:
        return (*self,)[index]

    @property
    def has_outputs(self) -> bool:
        return bool(self.finished or self.new_tokens or self.events)

    def add(self, other: "StepOutput") -> None:
        self.finished += other.finished
        self.new_tokens += other.new_tokens
        self.events += other.events
        self.num_prefill_tokens += other.num_prefill_tokens
        self.num_decode_tokens += other.num_decode_tokens


class OutputCollector:
    """Holds one caller's outputs. The engine's thread adds outputs, and the caller's thread removes them.

    Both threads use atomic operations instead of a lock, because a signal handler could deadlock on a lock.
    """

    def __init__(self, kind: OutputKind, max_steps_ahead: float = inf, max_seconds: float = inf):
        """
        max_steps_ahead: while the outputs of this many steps are unread, the engine runs no step for this caller.
        max_seconds: while there are no outputs, the caller gets token counts at this interval.
        """
        self.kind = kind
        self.max_steps_ahead = max_steps_ahead
        self.max_seconds = max_seconds
        self.live: set[int] = set()  # ids of unfinished requests
        self.new = StepOutput()  # of the current step; only the engine's thread uses it
        self._ended: set[int] = set()  # ids in `live` that ended in the current step
        self._outputs: SimpleQueue[StepOutput | RuntimeError] = SimpleQueue()
        self.error: RuntimeError | None = None  # taken from the queue, but not raised yet
        self._last_flush = 0.0

    @property
    def is_ready(self) -> bool:
        return self.error is not None or not self._outputs.empty()

    # -- for the engine's thread ---------------------------------------------------------------------------------------

    @property
    def wants_steps(self) -> bool:
        return bool(self.live) and self._outputs.qsize() < self.max_steps_ahead

    def end(self, request_id: int) -> None:
        """Mark a request as ended. The next call of `put` delivers the request's last output."""
        self._ended.add(request_id)

    def put(self, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        """Deliver the outputs of a step to the caller. If there are no outputs, only update the token counts."""
        new = self.new
        new.num_prefill_tokens += num_prefill_tokens
        new.num_decode_tokens += num_decode_tokens
        if new.has_outputs or perf_counter() > self._last_flush + self.max_seconds:
            self.flush()
        # comes last, because a thread that sees no live request expects no further output
        self.live.difference_update(self._ended)
        self._ended.clear()

    def flush(self) -> None:
        """Deliver all collected outputs to the caller. Wake the caller even if there are no outputs."""
        output, self.new = self.new, StepOutput()
        self._last_flush = perf_counter()
        self._outputs.put(output)

    def fail(self, error: RuntimeError) -> None:
        """Drop the caller's requests, and store the error, which the caller will raise."""
        self.new = StepOutput()
        self._outputs.put(error)
        self.live.clear()
        self._ended.clear()

    # -- for the caller's thread ---------------------------------------------------------------------------------------

    def take(self) -> StepOutput:
        """Wait for outputs, and return all new ones. Outputs that precede an error are returned first."""
        taken = StepOutput()
        self.take_into(taken, wait=True)
        if self.error is not None and not taken.has_outputs:
            error, self.error = self.error, None
            raise error
        return taken

    def take_into(self, taken: StepOutput, wait: bool = False) -> None:
        """Move outputs into `taken` until none is left or an error follows. Store the error in `self.error`."""
        with suppress(Empty):
            while self.error is None:
                output = self._outputs.get(wait)
                wait = False
                if isinstance(output, StepOutput):
                    taken.add(output)
                else:
                    self.error = output

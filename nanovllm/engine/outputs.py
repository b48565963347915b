"""The outputs that callers get.

The records are frozen. The caller may change lists in the records, because the engine no longer uses the lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple


class OutputKind(Enum):
    """Selects which outputs a caller gets."""

    FINAL_ONLY = auto()  # one output when a request ends
    DELTA = auto()  # an event for each new piece of an answer
    TOKENS = auto()  # every token id, and one output when a request ends


class Record(Mapping):
    """The base class of the output records. The fields of a record can be read as attributes or by key.

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
        likely tokens. If the request does not set `logprobs`, the field `logprobs` is None.
    finish_reason: one of "stop", "length", "abort" and "error" (if `structured_outputs` allows no next token).
    stop_reason: the stop string or id that ended the answer, or the message of an "error". `stop_reason` is None if
        `finish_reason` is "length" or "abort", or if the tokenizer's end-of-sequence id ended the answer. Other
        end-of-sequence ids of the model are reported as `stop_reason`.
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
    the last answer. Every other field is the earliest time among the answers.
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

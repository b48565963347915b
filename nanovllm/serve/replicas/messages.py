"""What the driver (the caller's process, or the server) and a replica send each other, pickled to bytes.

A message has tuples of plain data, about many requests. Ray passes bytes on as they are; any other object would go
through its own, slower serializer.
"""

import pickle
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from nanovllm.engine.outputs import CompletionOutput, Logprob, OutputKind, RequestMetrics
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.sampling_params import SamplingParams


class NewRequest(NamedTuple):
    """A request on its way to a replica, under the id that it has at the driver.

    prompt_index: of the prompt in its call. kind: DELTA if its answers are sent as they grow.
    noise_seeds: of each answer. generated: the tokens of each answer that the caller has from a replica that was lost;
        they are not sampled again. beams: it is a beam search with these parameters.
    """

    request_id: int
    prompt_index: int
    token_ids: list[int]
    params: SamplingParams
    priority: int
    kind: OutputKind
    noise_seeds: list[int]
    generated: list[list[int]]
    cache_salt: int = 0
    beams: BeamSearchParams | None = None


class Final(NamedTuple):
    """The end of a request. It has no `answers` if they were sent as deltas.

    seconds: from the request's arrival at the replica until it was scheduled, had its first token, and was finished:
        differences, as the clocks of two machines do not agree.
    """

    request_id: int
    answers: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    seconds: tuple[float | None, ...]


class Report(NamedTuple):
    """All that has happened to a replica's requests since its last report."""

    deltas: list[StreamEvent]
    finals: list[Final]
    errors: list[tuple[int, Exception]]  # (request id, what was raised when the request was queued)


_delta_fields = attrgetter(*StreamEvent.__dataclass_fields__)
_answer_fields = attrgetter(*CompletionOutput.__dataclass_fields__)


def encode_requests(requests: list[NewRequest]) -> bytes:
    """Parameters that several requests share are in the message once."""
    return pickle.dumps([tuple(request) for request in requests], protocol=5)


def decode_requests(data: bytes) -> Iterable[NewRequest]:
    return map(NewRequest._make, pickle.loads(data))


def encode_report(report: Report) -> bytes:
    deltas = [*map(_delta_fields, report.deltas)]
    finals = [(final.request_id, [*map(_answer_fields, final.answers)], *final[2:]) for final in report.finals]
    errors = [(request_id, _portable(error)) for request_id, error in report.errors]
    return pickle.dumps((deltas, finals, errors), protocol=5)


def decode_report(data: bytes) -> Report:
    deltas, finals, errors = pickle.loads(data)
    ends = [Final(i, [CompletionOutput(*fields) for fields in answers], *rest) for i, answers, *rest in finals]
    return Report([StreamEvent(*fields) for fields in deltas], ends, errors)


def make_final(request_id: int, answers: list, num_cached: int, prompt_logprobs: Any, times: RequestMetrics) -> Final:
    moments = times.first_scheduled_time, times.first_token_time, times.finished_time
    seconds = tuple(None if moment is None else moment - times.arrival_time for moment in moments)
    return Final(request_id, answers, num_cached, prompt_logprobs, seconds)


def _portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if pickle can't copy it, as its class is of a user."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))

"""What the front (the caller's process, or the server) and a replica send each other, pickled to bytes.

A message has tuples of plain data, about many requests. Ray passes bytes on as they are; any other object would go
through its own, slower serializer.
"""

import pickle
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.engine.outputs import CompletionOutput, Logprob, OutputKind, RequestMetrics, RequestOutput, StreamEvent
from nanovllm.engine.request import CompletionRequest
from nanovllm.sampling_params import SamplingParams

TokenLogprobs = list[dict[int, Logprob]]


class NewRequest(NamedTuple):
    """A request on its way to a replica.

    number: of the request, at the front. kind: whether its answers are sent in pieces.
    noise_seeds: of each answer. generated: the tokens of each answer that the caller has from a replica that was lost;
        they are not sampled again.
    """

    number: int
    token_ids: list[int]
    params: SamplingParams
    priority: int
    kind: OutputKind
    noise_seeds: list[int]
    generated: list[list[int]]


class Piece(NamedTuple):
    """A StreamEvent of the request with this number."""

    number: int
    output_index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: TokenLogprobs | None


class Ended(NamedTuple):
    """A request has ended. `answers` have the fields of CompletionOutput; there are none if they came in pieces.

    seconds: from the request's arrival at the replica until it was scheduled, had its first token, and was finished:
    differences, as the clocks of two machines do not agree.
    """

    number: int
    answers: list[tuple]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    seconds: tuple[float | None, float | None, float | None]


class Report(NamedTuple):
    """All that has happened to a replica's requests since its last report."""

    pieces: list[Piece]
    ended: list[Ended]
    errors: list[tuple[int, Exception]]  # (number, what was raised when the request was queued)


def encode_requests(requests: list[NewRequest]) -> bytes:
    """Parameters that several requests share are in the message once."""
    return pickle.dumps([tuple(request) for request in requests], protocol=5)


def decode_requests(data: bytes) -> Iterable[NewRequest]:
    return map(NewRequest._make, pickle.loads(data))


def encode_report(report: Report) -> bytes:
    pieces, ended = [tuple(piece) for piece in report.pieces], [tuple(one) for one in report.ended]
    errors = [(number, _portable(error)) for number, error in report.errors]
    return pickle.dumps((pieces, ended, errors), protocol=5)


def decode_report(data: bytes) -> Report:
    pieces, ended, errors = pickle.loads(data)
    return Report([*map(Piece._make, pieces)], [*map(Ended._make, ended)], errors)


def _portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if pickle can't copy it, as its class is of a user."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def piece_of(number: int, event: StreamEvent) -> Piece:
    return Piece(
        number, event.output_index, event.text, event.token_ids, event.finish_reason, event.stop_reason, event.logprobs
    )


def ended_of(number: int, output: RequestOutput) -> Ended:
    answers = [_answer_fields(answer) for answer in output.outputs]
    return Ended(number, answers, output.num_cached_tokens, output.prompt_logprobs, _seconds(output.metrics))


def ended_in_pieces(number: int, request: CompletionRequest) -> Ended:
    """The same without the answers, which were sent."""
    num_cached_tokens = request.group[0].num_cached_tokens
    return Ended(number, [], num_cached_tokens, request.prompt_logprobs(), _seconds(request.metrics()))


def _seconds(times: RequestMetrics) -> tuple[float | None, float | None, float | None]:
    start = times.arrival_time
    scheduled, first, finished = times.first_scheduled_time, times.first_token_time, times.finished_time
    return scheduled and scheduled - start, first and first - start, finished and finished - start


def _answer_fields(answer: CompletionOutput) -> tuple:
    return tuple(getattr(answer, name) for name in CompletionOutput.__dataclass_fields__)

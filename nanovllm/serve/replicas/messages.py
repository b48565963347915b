"""Defines messages between a replica and the driver. The driver is the process of the caller or the server.

A message is a pickle of tuples, because Ray sends bytes unchanged. For other objects, Ray has a slower serializer.
"""

import pickle
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.outputs import CompletionOutput, Logprob, OutputKind, RequestMetrics
from nanovllm.engine.sequence import Sequence
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.lora.lora_request import LoRARequest
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.requests.request import TokensPrompt
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.vision.prompt_images import PromptImage, PromptImages, images_of


class NewRequest(NamedTuple):
    """A request for a replica, with the driver's request id.

    prompt_index: the index of the prompt in the call that submitted it.
    kind: DELTA if the replica sends answers in pieces.
    noise_seeds: for each answer, the seed of the sampling noise.
    generated: for each answer, the tokens that the caller has received from a lost replica. The tokens in `generated`
        are not sampled again.
    beams: the parameters of a beam search; `None` for other requests.
    pooling: the parameters of a request for a vector; `None` for other requests.
    lora_request: the adapter, if any.
    images: the images of the prompt. The images' placeholders are in `token_ids`.
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
    pooling: PoolingParams | None = None
    lora_request: LoRARequest | None = None
    images: list[PromptImage] | None = None

    def prompt(self, config: Config) -> TokensPrompt:
        """Return the prompt for the replica's engine."""
        prompt = TokensPrompt(prompt_token_ids=self.token_ids)
        if self.images is not None:
            image_token_id = config.model_config.vision.image_token_id
            prompt["multi_modal_data"] = PromptImages(self.images, self.token_ids, image_token_id)
        return prompt


class Final(NamedTuple):
    """The result of a finished request. If the answers were sent as deltas, `answers` is empty.

    seconds: three durations, from the request's arrival at the replica to its first scheduling, its first token and its
        end. Absolute times would be useless, because the clocks of two machines differ.
    data: the bytes of a vector's float32 numbers; `None` for generated answers, and for an aborted request.
    """

    request_id: int
    answers: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    seconds: tuple[float | None, ...]
    data: bytes | None = None


class Report(NamedTuple):
    """All news about a replica's requests since the previous report."""

    deltas: list[StreamEvent]
    finals: list[Final]
    errors: list[tuple[int, Exception]]  # (request id, error while the request was queued)


_delta_fields = attrgetter(*StreamEvent.__dataclass_fields__)
_answer_fields = attrgetter(*CompletionOutput.__dataclass_fields__)


def sent_images(seq: Sequence) -> list[PromptImage] | None:
    """Return the images to send with the request of `seq`."""
    return None if (images := images_of(seq)) is None else images.images


def encode_requests(requests: list[NewRequest]) -> bytes:
    """Encode requests. Parameters that several requests share are encoded only once."""
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
    ends = [
        Final(i, [CompletionOutput(*fields) for fields in answers], *other_fields)
        for i, answers, *other_fields in finals
    ]
    return Report([StreamEvent(*fields) for fields in deltas], ends, errors)


def make_final(
    request_id: int,
    answers: list,
    num_cached: int,
    prompt_logprobs: Any,
    times: RequestMetrics,
    data: bytes | None = None,
) -> Final:
    moments = times.first_scheduled_time, times.first_token_time, times.finished_time
    seconds = tuple(None if moment is None else moment - times.arrival_time for moment in moments)
    return Final(request_id, answers, num_cached, prompt_logprobs, seconds, data)


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with the error's text if the error can't be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))

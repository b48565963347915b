"""Defines the driver's record of a request, with the answers so far and the replica that computes them."""

from collections.abc import Callable
from dataclasses import replace
from time import time
from typing import Any

import numpy as np

from nanovllm.engine.outputs import RequestMetrics, RequestOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_request import PoolingRequest
from nanovllm.pooling.pooling_scheduler import NO_TOKENS
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.async_request import AsyncRequest, PartialAnswer
from nanovllm.serve.replicas.messages import Final, NewRequest, sent_images


class ResumableAnswer(PartialAnswer):
    """The part of an answer that the caller has received.

    If another replica sends the part again, the part is skipped.
    """

    num_tokens_again = num_characters_again = 0  # tokens and characters that are still to be skipped

    def skip(self, delta: StreamEvent) -> StreamEvent:
        """Return the part of a delta that the caller has not received.

        Raises RuntimeError if the delta's tokens differ from the tokens that the caller has received.
        """
        num_tokens = min(self.num_tokens_again, len(delta.token_ids))
        num_characters = min(self.num_characters_again, len(delta.text))
        if not (num_tokens or num_characters):
            return delta
        start = len(self.token_ids) - self.num_tokens_again
        if delta.token_ids[:num_tokens] != self.token_ids[start : start + num_tokens]:
            raise RuntimeError("its replica was lost, and another one has sampled other tokens than those delivered")
        self.num_tokens_again -= num_tokens
        self.num_characters_again -= num_characters
        logprobs = None if delta.logprobs is None else delta.logprobs[num_tokens:]
        text, token_ids = delta.text[num_characters:], delta.token_ids[num_tokens:]
        return replace(delta, text=text, token_ids=token_ids, logprobs=logprobs)


class ReplicaRequest(AsyncRequest):
    """A request that runs in another process. If the other process is lost, another replica takes over the request.

    The caller gets each delta once. A new replica sends the whole answer, and this class skips the part that the caller
    has received. The new replica samples only the remaining tokens. If the request asks for log-probabilities, the new
    replica samples all tokens again. The sampling noise depends only on the request, so the new replica samples the
    same tokens, unless rounding errors differ. If a new token differs from the token that the caller has received, the
    request ends with an error.
    """

    num_cached_tokens = 0  # prompt tokens found in the replica's prefix cache; 0 until the request has ended

    def __init__(self, request: CompletionRequest, on_end: Callable[["ReplicaRequest"], None], name: str = ""):
        """Record a new request. `on_end` is called when the request finishes or fails, but not if it is discarded."""
        super().__init__(request, name)
        self.on_end = on_end
        self.replica_index: int | None = None  # the replica that computes it
        self.num_failures = 0  # number of replicas that were lost while they computed the request
        self.is_aborted = False  # whether the replica was told to end the request
        self.error: Exception | None = None
        self._sent_time = self.arrival_time
        self._first_delta_time: float | None = None
        self._answers = [ResumableAnswer(i) for i in range(self.num_answers)]

    @property
    def order(self) -> tuple:
        """The request's unique sort key. The request with the lowest key is scheduled first."""
        return self.request.group[0].order

    @property
    def has_ended(self) -> bool:
        return self.final is not None or self.error is not None

    def message(self, replica_index: int) -> NewRequest:
        """Assign the request to a replica. Return the message for the replica."""
        self.replica_index, self._sent_time = replica_index, time()
        params: Any = self.request.params
        pooling = params if isinstance(params, PoolingParams) else None
        params = NO_TOKENS if pooling else params
        if type(params) is not SamplingParams:  # a replica may be unable to import a class of the caller
            params = SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__dataclass_fields__})
        generated = [[] if params.logprobs is not None else _generated(answer) for answer in self._answers]
        for answer in self._answers:
            answer.num_tokens_again, answer.num_characters_again = len(answer.token_ids), sum(map(len, answer.texts))
        group = self.request.group
        seeds = [seq.noise_seed for seq in group]
        return NewRequest(
            self.request_id,
            self.request.index,
            self.prompt_token_ids,
            params,
            group[0].priority,
            self.request.kind,
            seeds,
            generated,
            group[0].cache_salt,
            pooling=pooling,
            lora_request=self.request.lora_request,
            images=sent_images(group[0]),
        )

    def add_event(self, delta: StreamEvent) -> None:
        """Add the part of a delta that the caller has not received. Raises RuntimeError like `ResumableAnswer.skip`."""
        answer = self._answers[delta.output_index]
        if answer.finish_reason is not None:
            return  # this answer had ended before another replica took over the request
        new = answer.skip(delta)
        if new.token_ids or new.text or new.finish_reason:
            self._add(answer, new)

    def _add(self, answer: ResumableAnswer, delta: StreamEvent) -> None:
        if self._first_delta_time is None:
            self._first_delta_time = time()
        answer.add(delta)
        self._events.append(delta)

    def finish(self, final: Final) -> None:
        """Set the output of a request that the replica has computed completely."""
        # a replica that took over the request may also have found generated tokens in its cache
        self.num_cached_tokens = min(final.num_cached_tokens, len(self.prompt_token_ids))
        scheduled, first_token, finished = (
            None if seconds is None else self._sent_time + seconds for seconds in final.seconds
        )
        if self.num_failures and self._first_delta_time is not None:  # another replica had sampled the first token
            first_token = self._first_delta_time
        metrics = RequestMetrics(self.arrival_time, scheduled, first_token, finished)
        if isinstance(self.request, PoolingRequest):
            data = None if final.data is None else np.frombuffer(final.data, np.float32)
            super().finish(self.request.output_of(data, self.num_cached_tokens, metrics))
            return
        super().finish(
            RequestOutput(
                self.request_id,
                self.request.prompt,
                self.prompt_token_ids,
                final.answers or [answer.output() for answer in self._answers],
                True,
                self.num_cached_tokens,
                final.prompt_logprobs,
                metrics,
            )
        )

    def end_aborted(self) -> None:
        """End a request that no replica computes. The output contains the tokens that the caller has received."""
        for answer in self._answers:
            if answer.finish_reason is None:
                ids = self.request.index, answer.index, self.request_id
                self._add(answer, StreamEvent(*ids, "", [], "abort", None, None))
        self.finish(Final(self.request_id, [], 0, None, (None, None, time() - self._sent_time)))
        self.tell()

    def fail_after_losses(self, cause: Exception) -> None:
        self.fail(
            RuntimeError(
                f"request {self.request_id}: {self.num_failures} replicas were lost while they computed it; the last "
                f"one by {cause!r:.500}"
            )
        )

    def fail(self, error: Exception) -> None:
        self.error = error
        super().fail(error)


def _generated(answer: ResumableAnswer) -> list[int]:
    """Return the tokens that are not sampled again. If an answer has ended, only its last token is sampled again."""
    return answer.token_ids[: -1 if answer.finish_reason else None]

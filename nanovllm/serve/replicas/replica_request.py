"""A request as the front sees it: what its caller has received, and which replica computes it."""

from collections.abc import Callable
from time import time

from nanovllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from nanovllm.engine.request import CompletionRequest
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.async_request import AsyncRequest, PartialOutput
from nanovllm.serve.replicas.messages import Ended, NewRequest, Piece


class ReplicaRequest(AsyncRequest):
    """A request that another process computes. If that process is lost, another replica takes the request over.

    The caller gets every piece once. The new replica continues after the tokens that the caller has; a request with
    log-probabilities or structured outputs is computed again from the start. In both cases the replica sends the answer
    from its beginning, and what the caller has is skipped here. As the noise depends on the request alone, the tokens
    are those that one engine would have given, up to rounding.
    """

    num_cached_tokens = 0  # of the prompt, found in the prefix cache of the replica; 0 until the request has ended

    def __init__(self, request: CompletionRequest, on_end: Callable[["ReplicaRequest"], None], name: str = ""):
        """`on_end` is called once it has its answers or its error; not if it is discarded."""
        super().__init__(request, name)
        self.on_end = on_end
        self.replica: int | None = None  # that computes it
        self.num_failures = 0  # replicas that were lost while they computed it
        self.is_aborted = False  # its replica was told to end it
        self.error: Exception | None = None
        self._sent_time = self.arrival_time
        self._partial = PartialOutput(self)
        self._num_to_skip = [(0, 0)] * self.num_answers  # tokens and characters that will be received again

    @property
    def has_ended(self) -> bool:
        return self.final is not None or self.error is not None

    def message(self, replica: int) -> NewRequest:
        """The message that makes a replica compute this request. Its pieces are expected from now on."""
        self.replica, self._sent_time = replica, time()
        answers, params = self._partial.answers, self.request.params
        if type(params) is not SamplingParams:  # a class of the caller's, which a replica may not be able to import
            params = SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__dataclass_fields__})
        starts_anew = params.logprobs is not None or params.structured_outputs is not None
        generated = [[] if starts_anew else _generated(answer) for answer in answers]
        self._num_to_skip = [(len(answer.token_ids), len(answer.text)) for answer in answers]
        group = self.request.group
        seeds = [seq.noise_seed for seq in group]
        return NewRequest(
            self.request_id, self.prompt_token_ids, params, group[0].priority, self.request.inbox.kind, seeds, generated
        )

    def add_piece(self, piece: Piece) -> None:
        _, i, text, token_ids, finish_reason, stop_reason, logprobs = piece
        if self._partial.answers[i].finish_reason is not None:
            return  # this answer had ended before another replica took the request over
        num_tokens, num_characters = self._num_to_skip[i]
        if num_tokens or num_characters:
            left = max(0, num_tokens - len(token_ids)), max(0, num_characters - len(text))
            self._num_to_skip[i] = left
            token_ids, text = token_ids[num_tokens:], text[num_characters:]
            logprobs = None if logprobs is None else logprobs[num_tokens:]
            if not (token_ids or text or finish_reason):
                return
        event = StreamEvent(
            self.request.index, i, self.request_id, text, token_ids, finish_reason, stop_reason, logprobs
        )
        self._add(event)

    def _add(self, event: StreamEvent) -> None:
        self._partial.add(event)
        self._events.append(event)
        self._wake()

    def end(self, ended: Ended) -> None:
        """The replica has computed the whole request."""
        # a replica that took the request over may also have found generated tokens
        self.num_cached_tokens = min(ended.num_cached_tokens, len(self.prompt_token_ids))
        moments = [None if seconds is None else self._sent_time + seconds for seconds in ended.seconds]
        self.finish(
            RequestOutput(
                self.request_id,
                self.request.prompt,
                self.prompt_token_ids,
                [CompletionOutput(*fields) for fields in ended.answers] or self._partial.answers,
                True,
                self.num_cached_tokens,
                ended.prompt_logprobs,
                RequestMetrics(self.arrival_time, *moments),
            )
        )

    def end_aborted(self) -> None:
        """End it here, with the tokens that the caller has, as no replica computes it."""
        for answer in [*self._partial.answers]:
            if answer.finish_reason is None:
                self._add(StreamEvent(self.request.index, answer.index, self.request_id, "", [], "abort", None, None))
        self.end(Ended(self.request_id, [], 0, None, (None, None, time() - self._sent_time)))

    def fail(self, error: Exception) -> None:
        self.error = error
        super().fail(error)


def _generated(answer: CompletionOutput) -> list[int]:
    """The tokens that the next replica must not sample again. Of an answer that has ended, it samples the last one."""
    return answer.token_ids[: -1 if answer.finish_reason else None]

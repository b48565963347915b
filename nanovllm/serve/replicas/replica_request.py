"""A request as the front knows it: what its caller has got, and where it is computed."""

from collections.abc import Callable
from time import time

from nanovllm.engine.inbox import OutputKind
from nanovllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from nanovllm.engine.request import CompletionRequest
from nanovllm.serve.async_request import AsyncRequest, PartialOutput
from nanovllm.serve.replicas.messages import Ended, NewRequest, Piece


class ReplicaRequest(AsyncRequest):
    """The answers of a request that another process computes, which may be lost and computed again by a third one.

    The caller never gets a piece twice. A replica that takes a request over goes on behind the tokens that the caller
    has, or with log-probabilities or structured outputs starts anew; what it then sends again is left out here. As
    the noise depends on the request alone, both give the tokens that one engine would have given, up to rounding.
    """

    num_cached_tokens = 0  # of the prompt, found in the prefix cache of the replica; 0 until the request has ended

    def __init__(self, request: CompletionRequest, on_end: Callable[["ReplicaRequest"], None], name: str = ""):
        """`on_end` is called once it has its answers or its error; not if it is discarded."""
        super().__init__(request, name)
        self.on_end = on_end
        self.replica: int | None = None  # that computes it
        self.num_failures = 0  # replicas that were lost while they computed it
        self.error: Exception | None = None
        self._sent_time = self.arrival_time
        self._partial = PartialOutput(self)
        self._num_to_skip = [(0, 0)] * self.num_answers  # tokens and characters that are going to come again

    @property
    def in_pieces(self) -> bool:
        return self.request.inbox.kind is OutputKind.EVENTS

    @property
    def has_ended(self) -> bool:
        return self.final is not None or self.error is not None

    def message(self, replica: int) -> NewRequest:
        """What the replica needs. From now on, its pieces are expected."""
        self.replica, self._sent_time = replica, time()
        answers, params = self._partial.answers, self.request.params
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
            return  # it had ended before the replica of that time was lost
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
        self._partial.add(event)
        self._events.append(event)
        self._wake()

    def end(self, ended: Ended) -> None:
        """The replica has sent all that there is."""
        self.num_cached_tokens = ended.num_cached_tokens
        moments = [None if seconds is None else self._sent_time + seconds for seconds in ended.seconds]
        self.finish(
            RequestOutput(
                self.request_id,
                self.request.prompt,
                self.prompt_token_ids,
                [CompletionOutput(*fields) for fields in ended.answers] or self._partial.answers,
                True,
                ended.num_cached_tokens,
                ended.prompt_logprobs,
                RequestMetrics(self.arrival_time, *moments),
            )
        )

    def fail(self, error: Exception) -> None:
        self.error = error
        super().fail(error)


def _generated(answer: CompletionOutput) -> list[int]:
    """The tokens that need not be sampled again. Of an answer that has ended, a replica samples the last one."""
    return answer.token_ids[: -1 if answer.finish_reason else None]

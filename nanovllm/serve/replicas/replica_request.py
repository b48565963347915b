"""A request as the front sees it: what its caller has received, and which replica computes it."""

from collections.abc import Callable
from time import time

from nanovllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from nanovllm.engine.request import CompletionRequest
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.async_request import AsyncRequest, PartialAnswer
from nanovllm.serve.replicas.messages import Ended, NewRequest, Piece


class Answer(PartialAnswer):
    """What the caller has of an answer. A replica that takes the request over sends that again, and it is skipped."""

    num_tokens_again = num_characters_again = 0  # that are still to be skipped

    def skip(self, piece: Piece) -> Piece:
        """The part of a piece that is new. RuntimeError if the new replica has sampled other tokens."""
        num_tokens = min(self.num_tokens_again, len(piece.token_ids))
        num_characters = min(self.num_characters_again, len(piece.text))
        if not (num_tokens or num_characters):
            return piece
        start = len(self.token_ids) - self.num_tokens_again
        if piece.token_ids[:num_tokens] != self.token_ids[start : start + num_tokens]:
            raise RuntimeError("its replica was lost, and another one has sampled other tokens than those delivered")
        self.num_tokens_again -= num_tokens
        self.num_characters_again -= num_characters
        logprobs = None if piece.logprobs is None else piece.logprobs[num_tokens:]
        text, token_ids = piece.text[num_characters:], piece.token_ids[num_tokens:]
        return piece._replace(text=text, token_ids=token_ids, logprobs=logprobs)


class ReplicaRequest(AsyncRequest):
    """A request that another process computes. If that process is lost, another replica takes the request over.

    The caller gets every piece once. The new replica continues after the tokens that the caller has; a request with
    log-probabilities is computed again from the start. In both cases the replica sends the answer from its beginning,
    and what the caller has is skipped here. As the noise depends on the request alone, the tokens are those that one
    engine would have given, up to rounding. If rounding has led to other tokens than those delivered, which only
    log-probabilities make possible, the request ends with an error.
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
        self._first_piece_time: float | None = None
        self._answers = [Answer(i) for i in range(self.num_answers)]

    @property
    def order(self) -> tuple:
        """The scheduling policy's; unique, and the least comes first."""
        return self.request.group[0].order

    @property
    def has_ended(self) -> bool:
        return self.final is not None or self.error is not None

    def message(self, replica: int) -> NewRequest:
        """The message that makes a replica compute this request. Its pieces are expected from now on."""
        self.replica, self._sent_time = replica, time()
        params = self.request.params
        if type(params) is not SamplingParams:  # a class of the caller's, which a replica may not be able to import
            params = SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__dataclass_fields__})
        generated = [[] if params.logprobs is not None else _generated(answer) for answer in self._answers]
        for answer in self._answers:
            answer.num_tokens_again, answer.num_characters_again = len(answer.token_ids), sum(map(len, answer.texts))
        group = self.request.group
        seeds = [seq.noise_seed for seq in group]
        return NewRequest(
            self.request_id, self.prompt_token_ids, params, group[0].priority, self.request.kind, seeds, generated
        )

    def add_piece(self, piece: Piece) -> None:
        """RuntimeError as in `Answer.skip`."""
        answer = self._answers[piece.output_index]
        if answer.finish_reason is not None:
            return  # this answer had ended before another replica took the request over
        new = answer.skip(piece)
        if new.token_ids or new.text or new.finish_reason:
            self._add(answer, new)

    def _add(self, answer: Answer, piece: Piece) -> None:
        if self._first_piece_time is None:
            self._first_piece_time = time()
        _, i, text, token_ids, finish_reason, stop_reason, logprobs = piece
        event = StreamEvent(
            self.request.index, i, self.request_id, text, token_ids, finish_reason, stop_reason, logprobs
        )
        answer.add(event)
        self._events.append(event)
        self._wake()

    def end(self, ended: Ended) -> None:
        """The replica has computed the whole request."""
        # a replica that took the request over may also have found generated tokens
        self.num_cached_tokens = min(ended.num_cached_tokens, len(self.prompt_token_ids))
        scheduled, first_token, finished = (
            None if seconds is None else self._sent_time + seconds for seconds in ended.seconds
        )
        if self.num_failures and self._first_piece_time is not None:  # another replica had sampled the first token
            first_token = self._first_piece_time
        self.finish(
            RequestOutput(
                self.request_id,
                self.request.prompt,
                self.prompt_token_ids,
                [CompletionOutput(*fields) for fields in ended.answers]
                or [answer.output() for answer in self._answers],
                True,
                self.num_cached_tokens,
                ended.prompt_logprobs,
                RequestMetrics(self.arrival_time, scheduled, first_token, finished),
            )
        )

    def end_aborted(self) -> None:
        """End it here, with the tokens that the caller has, as no replica computes it."""
        for answer in self._answers:
            if answer.finish_reason is None:
                self._add(answer, Piece(self.request_id, answer.index, "", [], "abort", None, None))
        self.end(Ended(self.request_id, [], 0, None, (None, None, time() - self._sent_time)))

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


def _generated(answer: Answer) -> list[int]:
    """The tokens that the next replica must not sample again. Of an answer that has ended, it samples the last one."""
    return answer.token_ids[: -1 if answer.finish_reason else None]

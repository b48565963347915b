"""Passes outputs from the engine's thread to a caller's thread."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from nanovllm.engine.outputs import OutputKind, RequestOutput


@dataclass(slots=True)
class StepOutput:
    """The new outputs for one caller from one or more steps.

    A StepOutput unpacks into a pair, as in `outputs, num_tokens = llm.step()`. `outputs` has a pair (request id, token
    ids) for each ended request. `num_tokens` is the number of computed prompt tokens or, if there are none, the negated
    number of decoded tokens.
    """

    finished: list[RequestOutput] = field(default_factory=list)
    new_tokens: list[tuple[int, int]] = field(default_factory=list)  # (request id, token id), for callers of `step`
    events: list[Any] = field(default_factory=list)  # StreamEvents, for callers of `stream`
    num_prefill_tokens: int = 0  # computed for all callers together
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
    """Holds one caller's outputs. The engine's thread adds them, and the caller's thread takes them.

    There is no lock, because a signal handler could deadlock on it.
    """

    def __init__(self, kind: OutputKind, max_steps_ahead: float = inf, max_seconds: float = inf):
        """
        max_steps_ahead: while the outputs of this many steps are unread, the engine runs no step for this caller.
        max_seconds: the interval in seconds at which the caller gets token counts while there are no outputs.
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
        """Mark a request as ended. The next `put` delivers its last output."""
        self._ended.add(request_id)

    def put(self) -> None:
        """Deliver a step's outputs, if any. Without outputs, deliver the token counts every `max_seconds`."""
        if self.new.has_outputs or perf_counter() > self._last_flush + self.max_seconds:
            self.flush()
        # comes last, because a thread that sees no live request expects no further output
        self.live.difference_update(self._ended)
        self._ended.clear()

    def flush(self) -> None:
        """Deliver all collected outputs, and wake the caller even if there are none."""
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
        """Wait for new outputs, and return all of them. An error is raised after the outputs before it."""
        taken = StepOutput()
        self.take_into(taken, wait=True)
        if self.error is not None and not taken.has_outputs:
            error, self.error = self.error, None
            raise error
        return taken

    def take_into(self, taken: StepOutput, wait: bool = False) -> None:
        """Move outputs into `taken`, up to the first error, which is stored in `self.error`."""
        with suppress(Empty):
            while self.error is None:
                output = self._outputs.get(wait)
                wait = False
                if isinstance(output, StepOutput):
                    taken.add(output)
                else:
                    self.error = output

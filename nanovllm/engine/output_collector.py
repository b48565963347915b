"""What has arrived for one caller and has not been read yet."""

from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter

from nanovllm.engine.outputs import OutputKind, StepOutput


class OutputCollector:
    """The outputs for one caller. The engine's thread puts them in, and the caller's thread takes them out.

    There is no lock that a signal handler could find taken: each side uses operations that are atomic in Python.
    """

    def __init__(self, kind: OutputKind, max_steps_ahead: float = inf, max_seconds: float = inf):
        """max_steps_ahead: while the outputs of so many steps are unread, the engine makes no step for this caller.
        max_seconds: without any output, the caller is told so often what the steps have computed.
        """
        self.kind = kind
        self.max_steps_ahead = max_steps_ahead
        self.max_seconds = max_seconds
        self.live: set[int] = set()  # ids of the requests that have not ended
        self.new = StepOutput()  # of the current step; for the engine's thread only
        self._ended: set[int] = set()  # those of `live` that ended in it
        self._outputs: SimpleQueue[StepOutput | RuntimeError] = SimpleQueue()
        self.error: RuntimeError | None = None  # taken from the queue, and not raised yet
        self._last_flush = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take."""
        return self.error is not None or not self._outputs.empty()

    # -- for the engine's thread ---------------------------------------------------------------------------------------

    @property
    def wants_steps(self) -> bool:
        return bool(self.live) and self._outputs.qsize() < self.max_steps_ahead

    def end(self, request_id: int) -> None:
        """The next `put` hands over the last output of this request."""
        self._ended.add(request_id)

    def put(self, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        """Hand over what a step has brought. The numbers of tokens of steps that brought nothing are added up."""
        new = self.new
        new.num_prefill_tokens += num_prefill_tokens
        new.num_decode_tokens += num_decode_tokens
        if new.has_outputs or perf_counter() > self._last_flush + self.max_seconds:
            self.flush()
        # last: a thread that sees no live request expects no further output
        self.live.difference_update(self._ended)
        self._ended.clear()

    def flush(self) -> None:
        """Hand over what there is."""
        output, self.new = self.new, StepOutput()
        self._last_flush = perf_counter()
        self._outputs.put(output)

    def fail(self, error: RuntimeError) -> None:
        """Hand over the error that tells the caller that its requests were dropped."""
        self.new = StepOutput()
        self._outputs.put(error)
        self.live.clear()
        self._ended.clear()

    # -- for the caller's thread ---------------------------------------------------------------------------------------

    def take(self) -> StepOutput:
        """All outputs since the last call; waits until there is at least one, or raises the error that came instead.

        After an error, first the outputs that came before it are returned.
        """
        taken = StepOutput()
        self.take_into(taken, wait=True)
        if self.error is not None and not taken.has_outputs:
            error, self.error = self.error, None
            raise error
        return taken

    def take_into(self, taken: StepOutput, wait: bool = False) -> None:
        """Add all outputs since the last call, up to an error, which is kept in `error`."""
        with suppress(Empty):
            while self.error is None:
                output = self._outputs.get(wait)
                wait = False
                if isinstance(output, StepOutput):
                    taken.add(output)
                else:
                    self.error = output

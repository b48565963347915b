"""What has arrived for one caller and has not been read yet."""

import threading
from collections import deque
from enum import Enum, auto

from nanovllm.engine.outputs import StepOutput


class OutputKind(Enum):
    """What a caller gets of its requests."""

    FINAL = auto()  # one output when a request has ended
    EVENTS = auto()  # an event for every piece of an answer
    TOKENS = auto()  # every token id, and one output when a request has ended


class Inbox:
    """The outputs for one caller. The thread that runs a step, the leader, writes them; the caller's thread reads them.

    While the leader processes a step, it adds outputs to `collected`; `publish` hands them to the caller.
    """

    def __init__(self, kind: OutputKind):
        self.kind = kind
        self.live: set[int] = set()  # ids of the requests that have not ended
        self.ended: set[int] = set()  # those of them that ended in the step that is being processed
        self.is_ready = False  # there is something that the caller may be waiting for
        self.thread = threading.current_thread()
        self.has_reader = False  # `thread` itself has called `LLMEngine.step`
        self.collected = StepOutput()
        self._published: deque[StepOutput] = deque()  # its methods are atomic, so that no lock is needed
        self._error: BaseException | None = None  # that ended its requests

    def publish(self, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> None:
        output, self.collected = self.collected, StepOutput()
        output.num_prefill_tokens, output.num_decode_tokens = num_prefill_tokens, num_decode_tokens
        self._published.append(output)
        if output.finished or output.new_tokens or output.events:
            self.is_ready = True
        # only now: a thread that sees no live request expects no further output
        self.live.difference_update(self.ended)
        self.ended.clear()

    def fail(self, error: BaseException | None) -> None:
        """Its requests were dropped: by an error, which `take` raises, or with None by a call that raises its own."""
        self.collected = StepOutput()
        self._error = error
        self.is_ready = error is not None
        self.live.clear()
        self.ended.clear()

    def take(self) -> StepOutput:
        """All outputs since the last call. After an error, first those before it, then RuntimeError."""
        self.is_ready = False
        output = StepOutput()
        while self._published:
            output.add(self._published.popleft())
        if (error := self._error) is not None:
            if output.finished or output.events:
                self.is_ready = True
                return output
            self._error = None
            raise RuntimeError(f"a step that another caller ran failed, and all requests with it: {error!r}") from error
        return output

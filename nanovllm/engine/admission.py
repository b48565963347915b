"""Orders waiting sequences, pauses their admission, and limits the number of prompt tokens in a step."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf, sqrt
from operator import attrgetter
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

MIN_SHARED_CHUNK = 32  # tokens; fewer are not worth a separate chunk
MAX_STEPS_WITHOUT_ADMISSION = 32


class WaitingQueue:
    """Keeps the waiting sequences, sorted by `order` (ascending). The first sequence is admitted next."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __repr__(self) -> str:
        return repr(self._seqs)

    def push(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=attrgetter("order"))

    def next_ready(self) -> Sequence | None:
        """Return the sequence to be admitted next, or None. Subclasses may first load its data."""
        return self._seqs[0] if self._seqs else None

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    def discard(self, seq: Sequence) -> None:
        i = bisect_left(self._seqs, seq.order, key=attrgetter("order"))
        if i < len(self._seqs) and self._seqs[i] is seq:
            del self._seqs[i]


class AdmissionPause:
    """Admits sequences in groups once the engine is full, so that most steps only decode.

    Admission pauses when a sequence does not fit, until a sixteenth of the running sequences have ended, or for
    MAX_STEPS_WITHOUT_ADMISSION steps.
    """

    def __init__(self) -> None:
        self._max_running: int | None = None  # admission is paused while more sequences run than this
        self._num_steps = 0  # since the pause began

    def is_on(self, num_running: int) -> bool:
        """Return whether admission is paused, without counting a step."""
        is_full = self._max_running is not None and num_running > self._max_running
        return is_full and self._num_steps < MAX_STEPS_WITHOUT_ADMISSION

    def may_admit(self, num_running: int) -> bool:
        """Return whether a sequence may be admitted. During a pause, each call counts as a step."""
        if is_on := self.is_on(num_running):
            self._num_steps += 1
        return not is_on

    def pause(self, num_running: int) -> None:
        """Pause admission, because a sequence did not fit."""
        self._max_running, self._num_steps = max(0, num_running - max(1, num_running // 16)), 0

    def resume(self) -> None:
        self._max_running, self._num_steps = None, 0


class TokenBudget(NamedTuple):
    """Limits a step to `num_tokens` prompt tokens. The cost of a token grows linearly with its context.

    At `context_of_equal_cost`, the cost is 2, because attention then costs as much as all other work for the token.
    """

    num_tokens: float
    context_of_equal_cost: float = inf

    def for_mixed_step(self, num_decodes: int, num_left: int) -> "TokenBudget":
        """Return the budget for the prompts of a step that decodes `num_decodes` tokens.

        `num_left` is the number of waiting prompt tokens. Short steps keep inter-token latency low, and long steps
        shorten the queue. As a compromise, a step has `num_left / 4` tokens in total, but at least `num_tokens / 2` and
        at most `num_tokens`. Prompts always get at least `num_tokens / 4` of the step's tokens.
        """
        num_tokens = min(self.num_tokens, max(self.num_tokens // 2, num_left // 4))
        return self._replace(num_tokens=max(1, num_tokens - num_decodes, self.num_tokens // 4))

    def cost(self, start: int, end: int) -> float:
        """Return the cost of the tokens `start:end` of a sequence, in the unit of `num_tokens`."""
        return (end - start) * (1 + (start + end) / 2 / self.context_of_equal_cost)

    def minus(self, start: int, end: int) -> "TokenBudget":
        return self._replace(num_tokens=self.num_tokens - self.cost(start, end))

    def chunk_end(self, start: int, end: int, others_wait: bool) -> int:
        """Return the end of the next chunk of the prompt tokens `start:end`, which has at least one token.

        If others wait, a long prompt gets half of the budget, so that its steps also compute short prompts.
        """
        if self.cost(start, end) <= self.num_tokens:
            return end
        share = self.num_tokens / 2 if others_wait and self.num_tokens >= 2 * MIN_SHARED_CHUNK else self.num_tokens
        context = self.context_of_equal_cost
        slope = 1 + start / context
        # n tokens cost n * slope + n^2 / (2 * context)
        n = share if context == inf else context * (sqrt(slope**2 + 2 * share / context) - slope)
        return start + max(1, int(n))

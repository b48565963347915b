"""Rules of the scheduler: who is served first, who is admitted, and how many tokens of prompts a step computes.

policies.py has more policies than first come, first served.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf, sqrt
from operator import attrgetter
from typing import Any, NamedTuple

from nanovllm.engine.sequence import Sequence

MIN_SHARED_CHUNK = 32  # tokens; less is not worth a separate chunk
MAX_STEPS_WITHOUT_ADMISSION = 32


class SchedulingPolicy:
    """Orders sequences. Subclass it for another order, and pass an instance as the setting `scheduling_policy`.

    The prompt of the sequence with the smallest `priority_key` is computed first. When cache blocks run out, the
    sequence with the largest key is preempted first. Sequences with equal keys are served in the order of arrival.
    """

    def priority_key(self, seq: Sequence) -> Any:
        """A key of `seq`: a number, or anything that can be compared with the keys of other sequences.

        Called once per request, with its first answer, before the request is queued. The thread that adds the request
        calls it and gets any error. Useful attributes of `seq` are `num_prompt_tokens`, `max_num_tokens` (prompt and
        output together), `priority`, `params`, and `arrival` in seconds of `time.perf_counter`.
        """
        raise NotImplementedError


class FCFS(SchedulingPolicy):
    """First come, first served: requests in the order in which they were added."""

    def priority_key(self, seq: Sequence) -> int:
        return 0


class WaitingQueue:
    """Sequences sorted by `order`, the next to be served first. A binary search finds a sequence."""

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

    def first(self) -> Sequence | None:
        return self._seqs[0] if self._seqs else None

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it is in the queue."""
        i = bisect_left(self._seqs, seq.order, key=attrgetter("order"))
        if i < len(self._seqs) and self._seqs[i] is seq:
            del self._seqs[i]


class AdmissionPause:
    """Admission with hysteresis: once the engine is full, sequences are admitted in groups.

    If every sequence that ends were replaced at once, most steps would be mixed steps, which delay all others. So the
    first sequence that does not fit pauses admission, until a sixteenth of the running sequences have ended or
    MAX_STEPS_WITHOUT_ADMISSION steps have passed.
    """

    def __init__(self) -> None:
        self._max_running: int | None = None  # admission is paused while more sequences run than this
        self._num_steps = 0  # since the pause began

    def may_admit(self, num_running: int) -> bool:
        """Whether a sequence may be admitted. Counts its calls while paused: the scheduler asks once a step then."""
        if self._max_running is None or num_running <= self._max_running:
            return True
        self._num_steps += 1
        return self._num_steps > MAX_STEPS_WITHOUT_ADMISSION

    def pause(self, num_running: int) -> None:
        """Stop admitting sequences, because one did not fit."""
        self._max_running, self._num_steps = max(0, num_running - max(1, num_running // 16)), 0

    def resume(self) -> None:
        """Admit sequences again, because one was admitted or none waits."""
        self._max_running, self._num_steps = None, 0


class TokenBudget(NamedTuple):
    """How many tokens of prompts a step may compute: `num_tokens` without a context, fewer after a long context.

    A token after a context of `context_of_equal_cost` tokens counts twice, because its attention costs as much as the
    rest.
    """

    num_tokens: float
    context_of_equal_cost: float = inf

    def for_mixed_step(self, num_decodes: int, num_left: int) -> "TokenBudget":
        """The budget for prompts next to `num_decodes` decoded tokens, when `num_left` tokens of prompts wait.

        Short steps keep inter-token latency low, and long steps shorten the queue. So decodes and prompts together get
        a quarter of the waiting tokens, but at least half of this budget and at most all of it. Prompts get at least a
        quarter of it, however many sequences decode.
        """
        num_tokens = min(self.num_tokens, max(self.num_tokens // 2, num_left // 4))
        return self._replace(num_tokens=max(1, num_tokens - num_decodes, self.num_tokens // 4))

    def cost(self, start: int, end: int) -> float:
        """The cost of the tokens `start:end` of a sequence, in units of `num_tokens`."""
        return (end - start) * (1 + (start + end) / 2 / self.context_of_equal_cost)

    def minus(self, start: int, end: int) -> "TokenBudget":
        """The budget that is left after the chunk `start:end`."""
        return self._replace(num_tokens=self.num_tokens - self.cost(start, end))

    def chunk_end(self, start: int, end: int, others_wait: bool) -> int:
        """The end of the next chunk of a prompt whose tokens `start:end` are left: `end` if the budget allows.

        Otherwise the chunk gets the whole budget, or half of it if other prompts wait, so that short prompts are
        computed next to a long one. It has at least one token.
        """
        if self.cost(start, end) <= self.num_tokens:
            return end
        share = self.num_tokens / 2 if others_wait and self.num_tokens >= 2 * MIN_SHARED_CHUNK else self.num_tokens
        context = self.context_of_equal_cost
        slope = 1 + start / context
        # n tokens cost n * slope + n^2 / (2 * context)
        n = share if context == inf else context * (sqrt(slope**2 + 2 * share / context) - slope)
        return start + max(1, int(n))

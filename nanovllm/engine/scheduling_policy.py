"""Who is served first: what a scheduling policy is, and the queue in its order. policies.py has other policies."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from nanovllm.engine.sequence import Sequence


class SchedulingPolicy:
    """Orders sequences. Subclass it for another order, and pass an instance as the setting `scheduling_policy`.

    The sequence with the least `priority_key` gets its prompt computed first. When cache blocks run out, the sequence
    with the greatest is preempted first. Of equal ones, the one whose request was added first comes first.
    """

    def priority_key(self, seq: Sequence) -> Any:
        """A key of `seq`: a number, or anything else that can be compared with the keys of other sequences.

        It is called once for each request, with the first of its answers, before the request is queued and in the
        thread that adds it, which gets any error. Useful attributes of `seq` are `num_prompt_tokens`, `max_num_tokens`
        (prompt and output together), `priority`, `params`, and `arrival` in seconds of `time.perf_counter`.
        """
        raise NotImplementedError


class FCFS(SchedulingPolicy):
    """First come, first served: requests in the order in which they were added."""

    def priority_key(self, seq: Sequence) -> int:
        return 0


class WaitingQueue:
    """Sequences in `order`, the first to be served first. It is a sorted list: a binary search finds a sequence."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def push(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=attrgetter("order"))

    def first(self) -> Sequence | None:
        return self._seqs[0] if self._seqs else None

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence, if it is there."""
        i = bisect_left(self._seqs, seq.order, key=attrgetter("order"))
        if i < len(self._seqs) and self._seqs[i] is seq:
            del self._seqs[i]

"""Who is served first: scheduling policies, and the queue that they keep in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from nanovllm.engine.sequence import Sequence


class SchedulingPolicy:
    """Orders sequences: for prompts when they wait, and for blocks when these run out. Subclass it for another order.

    The sequence that is served first has the smallest `urgency`, and the one with the greatest is preempted first. Of
    equal ones, the one whose request came first is the more urgent.
    """

    def urgency(self, seq: Sequence) -> Any:
        """Anything that can be compared. It is asked for once, when the sequence is queued for the first time."""
        raise NotImplementedError


class FCFS(SchedulingPolicy):
    """First come, first served."""

    def urgency(self, seq: Sequence) -> int:
        return 0


class Priority(SchedulingPolicy):
    """The lowest `priority` of a request first, as in vLLM."""

    def urgency(self, seq: Sequence) -> int:
        return seq.priority


POLICIES: dict[str, type[SchedulingPolicy]] = {"fcfs": FCFS, "priority": Priority}


def make_policy(policy: Any) -> SchedulingPolicy:
    """The policy of a name, or the object itself. ValueError for a name that is unknown, TypeError for other things."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"scheduling_policy={policy!r}: must be one of {', '.join(POLICIES)}, or an object")
        return POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "urgency", None)):
        raise TypeError(f"scheduling_policy={policy!r}: must be a name or an object with a method `urgency`")
    return policy


class WaitingQueue:
    """Sequences in `order`, the most urgent first. It is a sorted list: a binary search finds a sequence."""

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

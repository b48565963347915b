"""Who is served first: scheduling policies, and the queue that they keep in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

from nanovllm.engine.sequence import Sequence


class SchedulingPolicy:
    """Orders sequences. Subclass it for another order, and pass an instance as the setting `scheduling_policy`.

    The sequence with the smallest `urgency` gets its prompt computed first. When cache blocks run out, the sequence
    with the greatest is preempted first. Of equal ones, the one whose request was added first is the more urgent.
    """

    def urgency(self, seq: Sequence) -> Any:
        """A key of `seq`: a number, or anything else that can be compared with the keys of other sequences.

        It is called once for each request, with the first of its answers, before the request is queued and in the
        thread that adds it, which gets any error. Useful attributes of `seq` are `num_prompt_tokens`, `max_num_tokens`
        (prompt and output together), `priority`, `params`, and `arrival` in seconds of `time.perf_counter`.
        """
        raise NotImplementedError


class FCFS(SchedulingPolicy):
    """First come, first served: requests in the order in which they were added."""

    def urgency(self, seq: Sequence) -> int:
        return 0


class Priority(SchedulingPolicy):
    """The lowest `priority` of a request first, as in vLLM."""

    def urgency(self, seq: Sequence) -> int:
        return seq.priority


POLICIES: dict[str, type[SchedulingPolicy]] = {"fcfs": FCFS, "priority": Priority}


class CheckedPolicy(SchedulingPolicy):
    """A user's policy, whose keys are checked."""

    def __init__(self, policy: Any):
        self._policy = policy
        self._last_key: Any = None  # the last one that was accepted

    def urgency(self, seq: Sequence) -> Any:
        """TypeError for a key that can't be ordered with those before it."""
        key = self._policy.urgency(seq)
        other = key if self._last_key is None else self._last_key
        if not _are_ordered(key, other):
            name = type(self._policy).__name__
            raise TypeError(
                f"scheduling_policy: urgency of {name} returned {key!r:.80}, which must be less than, "
                f"equal to or greater than other keys, as {other!r:.80}"
            )
        self._last_key = key
        return key


def _are_ordered(a: Any, b: Any) -> bool:
    """False for None, for NaN, for sets of which none contains the other, and for a number and a string."""
    with suppress(Exception):  # the operators of a user's class may raise anything
        return bool(a < b or b < a or a == b)
    return False


def make_policy(policy: Any) -> SchedulingPolicy:
    """The policy of a name, or one that checks the keys of an object.

    ValueError for a name that is unknown; TypeError for anything else without a method `urgency`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"scheduling_policy={policy!r}: must be one of {', '.join(POLICIES)}, or an object")
        return POLICIES[policy]()
    if type(policy) in POLICIES.values():
        return policy
    if isinstance(policy, type) or not callable(getattr(policy, "urgency", None)):
        raise TypeError(f"scheduling_policy={policy!r}: must be a name or an object with a method `urgency`")
    return CheckedPolicy(policy)


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

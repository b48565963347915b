"""Scheduling policies, which order sequences."""

from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.setting_checks import POLICIES


class SchedulingPolicy:
    """Determines the order of sequences. For a custom order, set `scheduling_policy` to an instance of a subclass of
    this class.

    The prompt of the sequence with the smallest `priority_key` is computed first. When cache blocks run out, the
    sequence with the largest key is preempted first. Sequences with equal keys are served in the order of arrival.
    """

    def priority_key(self, seq: Sequence) -> Any:
        """Return the key of `seq`: a number, or anything that can be compared with the keys of other sequences.

        The engine calls this method once per request, with the request's first sequence, in the thread that adds the
        request. An error in this method is raised in the thread that adds the request. Useful attributes of `seq` are
        `num_prompt_tokens`, `max_num_tokens` (for prompt and output together), `priority`, `params` and `arrival`. The
        value of `arrival` comes from `time.perf_counter`.
        """
        raise NotImplementedError(f"{type(self).__name__}: must define a method `priority_key`")


class FCFS(SchedulingPolicy):
    """First come, first served."""

    def priority_key(self, seq: Sequence) -> int:
        return 0


class Priority(SchedulingPolicy):
    """Serves the request with the lowest `priority` first, as vLLM does."""

    def priority_key(self, seq: Sequence) -> int:
        return seq.priority


class CheckedPolicy(SchedulingPolicy):
    def __init__(self, policy: Any):
        self._policy = policy
        self._last_key: Any = None  # the last accepted key

    def priority_key(self, seq: Sequence) -> Any:
        """Return the policy's key. Raises TypeError if the key can't be compared with the previous key."""
        key = self._policy.priority_key(seq)
        known_key = key if self._last_key is None else self._last_key
        if not _are_ordered(key, known_key):
            name = type(self._policy).__name__
            raise TypeError(
                f"scheduling_policy: priority_key of {name} returned {key!r:.80}, which must be less than, "
                f"equal to or greater than other keys, such as {known_key!r:.80}"
            )
        self._last_key = key
        return key


def _are_ordered(a: Any, b: Any) -> bool:
    """Return whether `a` and `b` can be ordered. None and NaN can't be ordered. A number can't be ordered with a
    string.
    """
    with suppress(Exception):  # the operators of a user's class may raise anything
        return bool(a < b or b < a or a == b)
    return False


def make_policy(policy: Any) -> SchedulingPolicy:
    """Make a SchedulingPolicy from a policy's name or from a user's object."""
    if isinstance(policy, str):
        return resolve_name(POLICIES[policy])()
    return policy if type(policy) in (FCFS, Priority) else CheckedPolicy(policy)

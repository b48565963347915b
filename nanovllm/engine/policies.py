"""Scheduling policies other than first come, first served: by priority, or a user's policy with checked keys."""

from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from nanovllm.engine.scheduling_policy import FCFS, SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.setting_checks import POLICIES


class Priority(SchedulingPolicy):
    """The lowest `priority` of a request first, as in vLLM."""

    def priority_key(self, seq: Sequence) -> int:
        return seq.priority


class CheckedPolicy(SchedulingPolicy):
    """A user's policy, whose keys are checked."""

    def __init__(self, policy: Any):
        self._policy = policy
        self._last_key: Any = None  # the last accepted key

    def priority_key(self, seq: Sequence) -> Any:
        """TypeError for a key that can't be compared with the previous one."""
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
    """False for keys such as None, NaN, a number and a string, or sets of which none contains the other."""
    with suppress(Exception):  # the operators of a user's class may raise anything
        return bool(a < b or b < a or a == b)
    return False


def make_policy(policy: Any) -> SchedulingPolicy:
    """The policy for the setting `scheduling_policy`, which is a name or a user's object."""
    if isinstance(policy, str):
        return resolve_name(POLICIES[policy])()
    return policy if type(policy) in (FCFS, Priority) else CheckedPolicy(policy)

"""The scheduling policy `Priority`, and a wrapper that checks the keys of a user's policy."""

from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from nanovllm.engine.scheduling_policy import FCFS, SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.setting_checks import POLICIES


class Priority(SchedulingPolicy):
    """Serves the request with the lowest `priority` first, as vLLM does."""

    def priority_key(self, seq: Sequence) -> int:
        return seq.priority


class CheckedPolicy(SchedulingPolicy):
    def __init__(self, policy: Any):
        self._policy = policy
        self._last_key: Any = None  # the last accepted key

    def priority_key(self, seq: Sequence) -> Any:
        """Return the policy's key. Raises TypeError if this key can't be compared with the previous key."""
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
    """Return whether `a` and `b` can be ordered. None and NaN can't be ordered, nor can a number and a string."""
    with suppress(Exception):  # the operators of a user's class may raise anything
        return bool(a < b or b < a or a == b)
    return False


def make_policy(policy: Any) -> SchedulingPolicy:
    """Make a SchedulingPolicy from a policy's name or from a user's object."""
    if isinstance(policy, str):
        return resolve_name(POLICIES[policy])()
    return policy if type(policy) in (FCFS, Priority) else CheckedPolicy(policy)

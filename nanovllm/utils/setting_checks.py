"""Checks rarely used settings."""

from typing import Any

# names for the setting `scheduling_policy` -> module:class
POLICIES = {"fcfs": "nanovllm.engine.scheduling_policy:FCFS", "priority": "nanovllm.engine.scheduling_policy:Priority"}


def check_policy(name: str, policy: Any) -> Any:
    """Return `policy`.

    Raises ValueError if `policy` is an unknown name, and TypeError if `policy` is neither a name nor a policy.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            names = ", ".join(POLICIES)
            raise ValueError(f"{name}={policy!r}: must be one of {names}, or an object with a method `priority_key`")
    elif isinstance(policy, type):
        raise TypeError(f"{name}={policy!r}: must be an instance, such as {policy.__name__}(), not a class")
    elif not callable(getattr(policy, "priority_key", None)):
        raise TypeError(f"{name}={policy!r}: must be a name or an object with a method `priority_key`")
    return policy


def check_revision(name: str, revision: Any) -> str:
    if not isinstance(revision, str):
        raise TypeError(f"{name}={revision!r}: must be a string or None")
    return revision

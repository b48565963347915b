"""How much of the machine this process may use."""

import os


def available_cores() -> int:
    """The cores that this process may run on; where the system does not say, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

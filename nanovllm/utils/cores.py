"""How much of the machine this process may use."""

import os
from contextlib import suppress
from pathlib import Path

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor time in a period, or "max"


def available_cores() -> int:
    """The cores that this process may run on; where the system does not say, those of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # there is no limit, or no such file
        quota, period = CPU_LIMIT.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count

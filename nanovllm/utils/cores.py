"""Counts the cores that this process may use."""

import os
from contextlib import suppress
from pathlib import Path

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # a container's CPU time ("max": no limit) and period, in microseconds


def available_cores() -> int:
    """Return how many cores this process may use. If this number is unknown, return how many cores the machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no limit, or no such file
        quota, period = CPU_LIMIT.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count

"""Helpers for measurements: progress reports, calls in a new process, and the age of this process."""

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

IMPORTED = time.perf_counter()
_waited = 0.0  # seconds that this process has spent in `run_in_process`


def report(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str) -> Iterator[None]:
    report(f"{label} starts")
    begin = time.perf_counter()
    yield
    report(f"{label} ends after {time.perf_counter() - begin:.1f} s")


def show_engine_log() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)


def run_in_process(function, *arguments):
    """Call `function` in a new process. When the process ends, all memory of the call is freed."""
    global _waited
    begin, context = time.perf_counter(), multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=show_engine_log) as pool:
            future = pool.submit(function, *arguments)
            try:
                return future.result()
            except KeyboardInterrupt:  # Ctrl-C interrupts both processes; the other one still returns its results
                return future.result()
    finally:
        _waited += time.perf_counter() - begin


def seconds_since_start() -> float:
    """Return the age of this process in seconds, not counting the time in `run_in_process`.

    Outside Linux, return the time since the import of this file.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.perf_counter() - IMPORTED - _waited
    start_tick = int(fields[19])  # field 22, in ticks since boot; the first two fields were cut off
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_tick / os.sysconf("SC_CLK_TCK") - _waited

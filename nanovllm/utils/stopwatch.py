"""Measures the parts of a start."""

from time import perf_counter


class Stopwatch:
    """`seconds` by name: the time from the previous lap, or from the beginning, to the lap of that name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

"""How the time of something grows with its size, measured so that other programs on the machine do not decide."""

import gc
from collections.abc import Callable


def growth(seconds: Callable[[int], float], small: int, large: int, rounds: int = 4) -> float:
    """`seconds(large) / seconds(small)`, each the least of `rounds` that alternate, without garbage collection."""
    measured: dict[int, list[float]] = {small: [], large: []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for size, times in measured.items():
                times.append(seconds(size))
    finally:
        gc.enable()
    return min(measured[large]) / min(measured[small])

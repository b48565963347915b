"""How the time of something grows with its size, measured so that other programs on the machine do not decide."""

import gc
from collections.abc import Callable


def assert_grows_less(than: float, seconds: Callable[[int], float], small: int, large: int, rounds: int = 4) -> None:
    """Assert that `seconds(large)` is less than `than` times `seconds(small)`, without garbage collection.

    Of the small size the least of `rounds` counts, and of the large one the first of as many that is little enough.
    """
    gc.collect()
    gc.disable()
    try:
        least = min(seconds(small) for _ in range(rounds))
        growths = []
        while len(growths) < rounds and min(growths, default=than) >= than:
            growths.append(seconds(large) / least)
    finally:
        gc.enable()
    assert min(growths) < than, growths

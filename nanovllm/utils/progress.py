"""Progress bars."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from tqdm import tqdm

from nanovllm.utils.interrupts import interrupts_held

T = TypeVar("T")


@contextmanager
def progress_bar(total: int, disable: bool = False, **options) -> Iterator[Callable[..., None]]:
    """Show a tqdm bar. Yield a function `advance(n, **num_tokens)` to call when n more items are done.

    A bar is shown only on a terminal or in a notebook, because a file would keep all states of the bar. `num_tokens`
    contains the number of tokens of each kind since the previous call. The bar shows the rate of each kind of token.
    Ctrl-C is delayed while tqdm runs, because an interrupt could leave tqdm's shared lock acquired.
    """
    rates, last_time = {}, perf_counter()

    def advance(n: int, **num_tokens: int) -> None:
        nonlocal last_time
        now = perf_counter()
        for kind, count in num_tokens.items():
            if count:
                rates[kind] = f"{count / (now - last_time):.0f} tok/s"
        last_time = now
        with interrupts_held():
            bar.set_postfix(rates, refresh=False)
            bar.update(n)

    is_seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    with interrupts_held():
        bar = tqdm(total=total, disable=disable or not (total and is_seen), **options)
    try:
        yield advance
    finally:
        with interrupts_held():
            bar.close()


def with_bar(items: list[T], **options) -> Iterable[T]:
    with progress_bar(len(items), **options) as advance:
        for item in items:
            yield item
            advance(1)

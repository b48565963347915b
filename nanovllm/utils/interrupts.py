"""Delays Ctrl-C in code that must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_is_held = False  # whether a block of the main thread delays Ctrl-C


@contextmanager
def interrupts_held() -> Iterator[list]:
    """Delay Ctrl-C until the `with` block ends. If blocks are nested, delay Ctrl-C until the outermost block ends.

    Yields a list, which is empty until the outermost block is interrupted. The lists of inner blocks stay empty.
    Outside the main thread, nothing is delayed, because Python runs signal handlers in the main thread. Ctrl-C is also
    not delayed if its handler was not installed from Python, because Python could not restore this handler.
    """
    global _is_held
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main and not _is_held else None
    if handler is None:
        yield []
        return
    held: list = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
        _is_held = True
        yield held
    finally:
        _is_held = False
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)

"""Delays Ctrl-C in code that must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_is_held = False  # whether a block of the main thread delays Ctrl-C


@contextmanager
def interrupts_held() -> Iterator[list]:
    """Delay Ctrl-C until the block ends. If blocks are nested, delay Ctrl-C until the outermost block ends.

    Yields a list, which is empty until the outermost block is interrupted. Lists of nested blocks stay empty. In other
    threads than the main thread, nothing is delayed, because Python runs signal handlers in the main thread. Nothing is
    delayed either if the signal handler was not installed from Python, because Python could not restore it.
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

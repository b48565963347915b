"""Postpones Ctrl-C in code that must not be interrupted halfway."""

import signal
import threading
from contextlib import contextmanager

_is_held = False  # by an enclosing block of the main thread


@contextmanager
def interrupts_held():
    """Ctrl-C within the block takes effect at its end, or at the end of the outermost of nested blocks.

    Python runs signal handlers in the main thread only, so in other threads this does nothing. Nor does it if the
    handler was not installed by Python, which could not restore it.
    """
    global _is_held
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main and not _is_held else None
    if handler is None:
        yield
        return
    held = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
        _is_held = True
        yield
    finally:
        _is_held = False
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)

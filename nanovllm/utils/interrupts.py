"""Postpones Ctrl-C in code that must not be interrupted halfway."""

import signal
import threading
from contextlib import contextmanager


@contextmanager
def interrupts_held():
    """Ctrl-C within the block takes effect at its end.

    Python runs signal handlers in the main thread only, so in other threads this does nothing. Nor does it if the
    handler was not installed by Python, which could not restore it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    held = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)

"""What Ctrl-C must not cut in two."""

import signal
import threading
from contextlib import contextmanager


@contextmanager
def interrupts_held():
    """Ctrl-C within the block comes at its end.

    It always meets the main thread, so elsewhere there is nothing to hold; nor is there where its handler was not
    installed by Python, which could not put it back.
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

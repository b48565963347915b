"""Shows a message and the elapsed time during a long operation."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

DELAY = 1.0  # seconds until the message appears on a terminal
_is_shown = Lock()  # in nested blocks, only the message of the outermost block appears


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """Log the text. On a terminal, do not log, but show the text and the elapsed time until the `with` block ends."""
    if not _is_shown.acquire(blocking=False):
        yield
        return
    try:
        if sys.stderr and sys.stderr.isatty():
            with _shown_on_terminal(text):
                yield
        else:
            logging.getLogger("nanovllm").info("%s ...", text)
            yield
    finally:
        _is_shown.release()


@contextmanager
def _shown_on_terminal(text: str) -> Iterator[None]:
    is_done = Event()

    def show() -> None:
        if is_done.wait(DELAY):
            return
        from tqdm import tqdm

        # only this thread uses tqdm, because Ctrl-C inside it could leave its lock acquired
        with tqdm(bar_format="{desc}: {elapsed}", desc=text, leave=False, initial=0, total=0) as bar:
            bar.start_t -= DELAY
            while not is_done.wait(0.25):
                bar.refresh()
        sys.stderr.write("\033[K\r")  # erase the ^C that a terminal shows

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()

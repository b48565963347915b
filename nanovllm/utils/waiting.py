"""Shows a message and the elapsed time during a long operation."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

DELAY = 1.0  # seconds until the message appears
_is_shown = Lock()  # in nested blocks, only the message of the outermost block appears


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """If a `with` block takes long, show the text and the elapsed time on standard error, or log the text.

    The text is logged if standard error is not a terminal.
    """
    if not _is_shown.acquire(blocking=False):
        yield
        return
    is_done = Event()
    thread = Thread(target=_show, args=(text, is_done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        _is_shown.release()


def _show(text: str, is_done: Event) -> None:
    if is_done.wait(DELAY):
        return
    if not (sys.stderr and sys.stderr.isatty()):
        logging.getLogger("nanovllm").info("%s ...", text)
        return
    from tqdm import tqdm

    # only this thread uses tqdm, because Ctrl-C inside it could leave its lock acquired
    with tqdm(bar_format="{desc}: {elapsed}", desc=text, leave=False, initial=0, total=0) as bar:
        bar.start_t -= DELAY
        while not is_done.wait(0.25):
            bar.refresh()
    sys.stderr.write("\033[K\r")  # erase the ^C that a terminal shows

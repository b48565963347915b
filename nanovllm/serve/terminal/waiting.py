"""Says that something takes long, and for how long it has."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DELAY = 1.0  # seconds until anything is said


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """On a terminal, the text and the seconds so far, below other bars; else the text once. To the standard error."""
    is_done = threading.Event()

    def show() -> None:
        if is_done.wait(DELAY):
            return
        if not sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr, flush=True)
            return
        from tqdm import tqdm

        # in this thread alone, as Ctrl-C inside of tqdm could leave its lock acquired
        with tqdm(bar_format="{desc}: {elapsed}", desc=text, leave=False, initial=0, total=0) as bar:
            bar.start_t -= DELAY
            while not is_done.wait(0.25):
                bar.refresh()
        sys.stderr.write("\033[K\r")  # what a terminal has shown of a Ctrl-C

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()

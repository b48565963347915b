"""Shows a message and the elapsed time during a long operation."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DELAY = 1.0  # seconds until the message appears


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """Show the text on standard error during a `with` block, on a terminal with the elapsed time."""
    is_done = threading.Event()

    def show() -> None:
        if is_done.wait(DELAY):
            return
        if not sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr, flush=True)
            return
        from tqdm import tqdm

        # only this thread uses tqdm, because Ctrl-C inside it could leave its lock acquired
        with tqdm(bar_format="{desc}: {elapsed}", desc=text, leave=False, initial=0, total=0) as bar:
            bar.start_t -= DELAY
            while not is_done.wait(0.25):
                bar.refresh()
        sys.stderr.write("\033[K\r")  # erase the ^C that a terminal shows

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()

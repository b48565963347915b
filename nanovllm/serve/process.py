"""Prepares a process of the server before the process does anything else."""

import logging
import sys

# seconds until a thread releases the GIL to a waiting thread (Python's default is 0.005). While the device is idle, the
# engine's thread must not wait long for the thread that handles HTTP.
SWITCH_INTERVAL = 0.001


def set_up_process() -> None:
    """Make threads release the GIL sooner, and print the package's log, which contains settings and errors."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    handler = logging.StreamHandler()
    erase = "\r\033[K" if sys.stderr.isatty() else ""  # first erases a progress line
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("nanovllm").addHandler(handler)
    logging.getLogger("nanovllm").setLevel(logging.INFO)

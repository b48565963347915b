"""What a process that serves sets up before anything else."""

import logging
import sys

# seconds after which a thread lets another one that waits for the interpreter run (Python has 0.005): the engine's
# thread must not wait for the one that speaks to clients while the device is idle
SWITCH_INTERVAL = 0.001


def set_up_process() -> None:
    """Threads take turns quickly; what the package logs is printed: the engine's settings at the start, and errors."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    handler = logging.StreamHandler()
    erase = "\r\033[K" if sys.stderr.isatty() else ""  # a line of progress that stands there
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("nanovllm").addHandler(handler)
    logging.getLogger("nanovllm").setLevel(logging.INFO)

"""Starts HTTP servers in separate processes, and measures their CPU time and GPU utilization."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from nanovllm.benchmarks.processes import report

START_SECONDS = 1800.0  # until a server must be ready; vLLM may compile for minutes
END_SECONDS = 60.0  # until a server must have ended after SIGTERM
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # they end this process; Ctrl-C already raises an exception
LOG_LINES = 30


class Server(NamedTuple):
    process: subprocess.Popen
    port: int


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags. Most settings become `--name=value`, with dicts as JSON.

    Bools become `--name` or `--no-name`. A setting whose value is None is left out.
    """
    flags = []
    for name, value in settings.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


@contextmanager
def running_server(module: str, arguments: Sequence[str]) -> Iterator[Server]:
    """Run the server `python -m module` on a free port during a `with` block.

    The block starts when the server is ready. When the block ends, the server and its child processes stop. The server
    runs in a new process session, so Ctrl-C does not reach the server. If the block fails, the last lines of the
    server's log are printed. Raises RuntimeError if the server does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # the server imports the same packages as this process
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module, *arguments, "--host=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryFile() as log, ended_by_exceptions():
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            try:
                wait_until_ready(process, port)
                yield Server(process, port)
            finally:
                end(process)
        except Exception:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            report("\n".join([f"the last lines of the log of {module}:", *lines]))
            raise


@contextmanager
def ended_by_exceptions() -> Iterator[None]:
    """During a `with` block, raise SystemExit for signals that would otherwise kill this process."""
    handlers = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_until_ready(process: subprocess.Popen, port: int) -> None:
    """Wait until the server answers. Raises RuntimeError if the process ends, or if the start takes too long."""
    until = monotonic() + START_SECONDS
    while process.poll() is None and monotonic() < until:
        with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        sleep(0.1)
    ended = f"ended with status {process.returncode}" if process.returncode is not None else "is not ready"
    raise RuntimeError(f"the server {ended} after {monotonic() - until + START_SECONDS:.0f} seconds")


def end(process: subprocess.Popen) -> None:
    """End the server with SIGTERM, as a user would, and then kill the remaining processes of the server's session."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- resources of a server ---------------------------------------------------------------------------------------------

Threads = dict[tuple[int, int], tuple[str, float]]  # by the ids of process and thread: name, seconds of CPU time


def cpu_times(server: Server, since: Threads | None = None) -> Threads:
    """Return the CPU time of each server thread, or {} outside Linux.

    If an earlier result is given as `since`, return only the CPU time that was used after it.
    """
    threads: Threads = {}
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with suppress(OSError):  # a thread that has ended
            name, _, fields_text = stat.read_text(errors="replace").rpartition(")")  # a name may contain ")"
            fields = fields_text.split()  # the list begins with the third field
            if int(fields[3]) == server.process.pid:  # the session that the thread belongs to
                key, ticks = (int(stat.parts[2]), int(stat.parts[4])), int(fields[11]) + int(fields[12])
                before = since.get(key, ("", 0.0))[1] if since else 0.0
                threads[key] = name.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK") - before
    return threads


@contextmanager
def gpu_samples() -> Iterator[list[list[float]]]:
    """During a `with` block, measure each GPU's utilization (in percent) once a second, if `nvidia-smi` exists."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    samples: list[list[float]] = []
    ended = threading.Event()

    def run() -> None:
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            while not ended.wait(1):
                lines = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout
                samples.append([float(line) for line in lines.splitlines()])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()

"""Runs the engine's process, which starts the fronts and computes their requests.

The fronts start before this process imports PyTorch, so all processes import their libraries at the same time.
"""

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.serve.fronts.channel import Channel, FromEngine, decode_from_front
from nanovllm.serve.settings import ServerSettings
from nanovllm.utils.libraries import import_libraries

if TYPE_CHECKING:
    from nanovllm.llm import LLM

logger = logging.getLogger("nanovllm")
START_SECONDS = 300.0  # time for a front to get ready, once the engine has started
MAX_FAILED_STARTS = 10  # consecutive failed starts of a front that is restarted
SETTLED_SECONDS = 10.0  # if a front ends by itself within this time after it was ready, its start counts as failed
END_SECONDS = 10.0  # time for fronts to end, once the time for running requests is over
URGENT_SECONDS = 3.0  # time for fronts to end after a second Ctrl-C
TURN_SECONDS = 0.1  # the end of a front is noticed within this time
BLOCKED = signal.SIGINT, signal.SIGTERM  # signals that are blocked while a front is started


class FrontPlan(NamedTuple):
    """The data that a front needs to start.

    num_live: the number of live (running or waiting) answers of each front, in shared memory. The sum over all fronts
        is limited. If several fronts accept requests at the same instant, this sum may slightly exceed its limit.
    listener: the listening socket, or `None` if each front opens a socket at the address in `settings`.
    """

    model: str
    settings: ServerSettings
    engine_settings: dict[str, Any]
    num_live: Any
    listener: socket.socket | None


def make_plan(
    model: str, settings: ServerSettings, engine_settings: dict[str, Any], listener: socket.socket
) -> FrontPlan:
    """Make the plan. Fronts use `listener` if it is a Unix socket, or if there is only one front."""
    count, port = settings.num_fronts, settings.port if settings.uds else listener.getsockname()[1]
    front_settings = replace(settings, port=port, max_connections=max(1, settings.max_connections // count))
    is_passed = bool(settings.uds) or count == 1
    return FrontPlan(model, front_settings, engine_settings, RawArray("q", count), listener if is_passed else None)


def run_front(plan: FrontPlan, index: int, end: socket.socket) -> None:
    """Run a front in this process.

    The engine's process handles Ctrl-C, and then lets the fronts finish their running requests.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal may send it if a background group writes its log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also drops a SIGINT that arrived while it was blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    import_libraries({"device": "cpu"})
    from nanovllm.serve.fronts.front import serve_front  # lazy, because only fronts need the HTTP libraries

    serve_front(plan, index, end)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay the signals in `BLOCKED` until a `with` block ends."""
    resource_tracker.ensure_running()  # otherwise, `process.start` would start the tracker, which unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Fronts:
    """The fronts of an engine.

    If a front ends, its requests are dropped, and the front restarts. Other fronts continue to run.
    """

    def __init__(self, plan: FrontPlan):
        self._plan = plan
        self._make_session: Callable[[Channel], object] = lambda channel: None
        self._has_engine = False  # until the engine is loaded
        self._processes: dict[int, SpawnProcess] = {}  # by index
        self._starting: dict[int, tuple[Channel, float]] = {}  # fronts that are not ready yet, with deadlines
        self._num_failures = [0] * len(plan.num_live)  # failed starts in a row
        self._ready_at = [-inf] * len(plan.num_live)  # when each front last became ready
        self.is_ending = self.has_failed = False
        self._deadline = inf  # when all fronts must have ended

    def begin(self) -> None:
        """Start all fronts in parallel. The fronts listen only after the engine has started."""
        for index in range(len(self._num_failures)):
            self._begin(index)

    def listen(self, make_session: Callable[[Channel], object]) -> None:
        """Tell the fronts that the engine has started, and wait until all of them listen.

        make_session: a function that creates a front's Session from the front's channel.

        If a front does not start, raises a ValueError that contains the front's reason. If the front gave no reason,
        raises RuntimeError.
        """
        self._make_session, self._has_engine = make_session, True
        for index, (channel, _) in self._starting.items():
            self._starting[index] = channel, self._say_that_the_engine_has_started(channel)
        while self._starting and not self.is_ending:
            self._turn(max_failures=1)

    def watch(self) -> None:
        """Until `end` is called, restart each front that ends. Raises RuntimeError if restarts keep failing."""
        while not self.is_ending:
            self._turn(MAX_FAILED_STARTS)

    @staticmethod
    def _say_that_the_engine_has_started(channel: Channel) -> float:
        with suppress(OSError):  # the front has ended, which `_turn` notices
            channel.send(FromEngine())
        return monotonic() + START_SECONDS

    def _begin(self, index: int) -> None:
        own_end, other_end = socket.socketpair()
        self._plan.num_live[index] = 0
        process = SpawnProcess(target=run_front, args=(self._plan, index, other_end), name=f"nanovllm-front-{index}")
        with _signals_blocked():
            process.start()
            self._processes[index] = process
        other_end.close()
        channel = Channel(own_end)
        until = self._say_that_the_engine_has_started(channel) if self._has_engine else inf
        self._starting[index] = channel, until

    def _turn(self, max_failures: int) -> None:
        """Wait a short time for news from fronts: a front is ready, or a front has ended. Handle the news."""
        channels = [channel.fileno() for channel, _ in self._starting.values()]
        changed = wait([*channels, *(process.sentinel for process in self._processes.values())], TURN_SECONDS)
        for index, (channel, deadline) in [*self._starting.items()]:
            if (has_news := channel.fileno() in changed) and self._is_ready(index, channel, max_failures):
                del self._starting[index]
                self._ready_at[index] = monotonic()
                self._make_session(channel)
            elif has_news or monotonic() > deadline:
                self._processes[index].kill()
                self._processes[index].join()
        for index, process in self._processes.items():
            if not (process.is_alive() or self.is_ending):
                self._begin_again(index, process, max_failures)

    def _is_ready(self, index: int, channel: Channel, max_failures: int) -> bool:
        try:
            problem = decode_from_front(channel.receive()).problem
        except OSError:  # the front has ended
            return False
        if problem and max_failures == 1:  # the settings are wrong, or a library is missing
            raise ValueError(problem)
        if problem:
            logger.error("%s: %s", self._processes[index].name, problem)
        return not problem

    def _begin_again(self, index: int, process: SpawnProcess, max_failures: int) -> None:
        ended = f"{process.name} has ended (exit status {process.exitcode})"
        if not (has_started := index not in self._starting):
            self._starting.pop(index)[0].close()
        # the start has not failed if the front was killed from outside, or has worked for a while
        is_well = (process.exitcode or 0) < 0 or monotonic() > self._ready_at[index] + SETTLED_SECONDS
        self._num_failures[index] = 0 if has_started and is_well else self._num_failures[index] + 1
        if self._num_failures[index] >= max_failures and (max_failures > 1 or not has_started):
            again = f", {max_failures} times in a row" if max_failures > 1 else ""
            raise RuntimeError(f"{ended} {'soon after' if has_started else 'before'} it was ready{again}")
        logger.warning("%s, and starts again", ended)
        self._begin(index)

    def fail(self) -> None:
        self.has_failed = True
        self.end()

    def end(self, number: int = signal.SIGTERM, *_: Any) -> None:
        """Let all fronts finish their running requests and end.

        After a second Ctrl-C, the fronts do not wait for requests.
        """
        if is_urgent := self.is_ending and number == signal.SIGINT:
            self._deadline = monotonic() + URGENT_SECONDS
        self.is_ending = True
        for process in [*self._processes.values()]:
            if is_urgent and process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
            else:
                process.terminate()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` seconds for the fronts to end, then kill those that still run.

        A second Ctrl-C shortens the wait.
        """
        end = monotonic() + seconds
        while any(process.is_alive() for process in self._processes.values()) and monotonic() < min(
            end, self._deadline
        ):
            wait([process.sentinel for process in self._processes.values() if process.is_alive()], TURN_SECONDS)
        for process in self._processes.values():
            process.kill()
            process.join()


def serve_by_fronts(
    model: str,
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    listener: socket.socket,
    prepare: Callable[[], None],
    on_start: Callable[[], None],
) -> int:
    """Serve until SIGTERM, Ctrl-C or an engine failure, and return the exit status of the process.

    listener: the socket that has reserved the address.
    prepare: a function to call while the fronts start, before the model is loaded.
    on_start: a function to call once the fronts listen.
    """
    with tempfile.TemporaryDirectory() as folder:  # for the fronts' metrics, which are summed
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        fronts = Fronts(make_plan(model, settings, engine_settings, listener))
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` cleans up
        try:
            fronts.begin()
            prepare()
            from nanovllm.llm import LLM  # lazy, like everything that needs PyTorch

            engine = LLM(model, **engine_settings)
            for adapter in settings.adapters() if engine.config.enable_lora else ():  # else the fronts report an error
                engine.add_lora(adapter)
            gc.collect()
            gc.freeze()  # as in `run_server`
            return _serve(engine, fronts, listener, on_start, settings.drain_seconds + END_SECONDS)
        finally:
            fronts.join(0.0)


def _serve(
    engine: "LLM", fronts: Fronts, listener: socket.socket, on_start: Callable[[], None], end_seconds: float
) -> int:
    from nanovllm.serve.engine_calls import StepSizes
    from nanovllm.serve.fronts.session import Session

    handlers = {number: signal.signal(number, fronts.end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        fronts.listen(partial(Session, engine, StepSizes(engine), fronts.fail))
        on_start()
        fronts.watch()
    except RuntimeError as error:
        logger.error("%s", error)
        fronts.fail()
    finally:
        fronts.end()
        listener.close()  # otherwise, new clients would wait until the last front has drained
        fronts.join(end_seconds)
        engine.exit()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(fronts.has_failed)

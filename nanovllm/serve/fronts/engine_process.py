"""The process of the engine, which starts the fronts and computes for them.

Until the engine is loaded this needs no PyTorch, so that the fronts import their libraries while this process does.
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
START_SECONDS = 300.0  # of a front, once the engine has started
MAX_FAILED_STARTS = 10  # in a row, of a front that had to be started again
SETTLED_SECONDS = 10.0  # a front that ends by itself sooner after it was ready counts as one that has not started
END_SECONDS = 10.0  # after the time in which running requests may end
URGENT_SECONDS = 3.0  # after a second Ctrl-C
TURN_SECONDS = 0.1  # after which an end is noticed at the latest
BLOCKED = signal.SIGINT, signal.SIGTERM  # while a front is started


class FrontPlan(NamedTuple):
    """What all fronts of an engine need to know.

    num_live: in shared memory, the number of answers of each front: the bound holds for their sum, but for what several
        fronts accept in the same instant.
    listener: None is one of its own for each front, at the address of `settings`.
    """

    model: str
    settings: ServerSettings
    engine_settings: dict[str, Any]
    num_live: Any
    listener: socket.socket | None


def make_plan(
    model: str, settings: ServerSettings, engine_settings: dict[str, Any], listener: socket.socket
) -> FrontPlan:
    """listener: has reserved the address. A single front has it; several share it only where that is a file."""
    count, port = settings.num_fronts, settings.port if settings.uds else listener.getsockname()[1]
    own = replace(settings, port=port, max_connections=max(1, settings.max_connections // count))
    is_passed = bool(settings.uds) or count == 1
    return FrontPlan(model, own, engine_settings, RawArray("q", count), listener if is_passed else None)


def run_front(plan: FrontPlan, index: int, end: socket.socket) -> None:
    """The process of a front. Ctrl-C reaches the engine's process alone, which lets the fronts drain."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which a terminal may send for the log of such a group
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also one that has come while it was blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    import_libraries({"device": "cpu"})
    from nanovllm.serve.fronts.front import serve_front  # imported lazily: only fronts do HTTP

    serve_front(plan, index, end)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is started meanwhile begins with these signals blocked, and this one gets them afterwards."""
    resource_tracker.ensure_running()  # whose start would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Fronts:
    """The fronts of an engine. One that ends is started again; its requests are dropped, and the others go on."""

    def __init__(self, plan: FrontPlan):
        self._plan = plan
        self._make_session: Callable[[Channel], object] = lambda channel: None
        self._has_engine = False  # it is being loaded
        self._processes: dict[int, SpawnProcess] = {}  # by index, as those that start
        self._starting: dict[int, tuple[Channel, float]] = {}  # that are not ready yet, and until when they must be
        self._num_failures = [0] * len(plan.num_live)  # starts in a row that have failed
        self._ready_at = [-inf] * len(plan.num_live)  # when each was ready last
        self.is_ending = self.has_failed = False
        self._deadline = inf  # when all must have ended

    def begin(self) -> None:
        """Start all, side by side. They do not listen before the engine has started."""
        for index in range(len(self._num_failures)):
            self._begin(index)

    def listen(self, make_session: Callable[[Channel], object]) -> None:
        """The engine has started: wait until all listen. RuntimeError if one does not start, ValueError if it says why.

        make_session: computes what a front asks for over its channel.
        """
        self._make_session, self._has_engine = make_session, True
        for index, (channel, _) in self._starting.items():
            self._starting[index] = channel, self._say_that_the_engine_has_started(channel)
        while self._starting and not self.is_ending:
            self._turn(max_failures=1)

    def watch(self) -> None:
        """Start those again that end, until `end`. RuntimeError if that fails again and again."""
        while not self.is_ending:
            self._turn(MAX_FAILED_STARTS)

    @staticmethod
    def _say_that_the_engine_has_started(channel: Channel) -> float:
        """Until when the front must be ready."""
        with suppress(OSError):  # it has ended, which is noticed elsewhere
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
        """Wait until a front is ready, or has ended. RuntimeError after so many starts in a row that have failed."""
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
        except OSError:  # it has ended
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
        # killed from outside, or it has worked for a while
        is_well = (process.exitcode or 0) < 0 or monotonic() > self._ready_at[index] + SETTLED_SECONDS
        self._num_failures[index] = 0 if has_started and is_well else self._num_failures[index] + 1
        if self._num_failures[index] >= max_failures and (max_failures > 1 or not has_started):
            again = f", {max_failures} times in a row" if max_failures > 1 else ""
            raise RuntimeError(f"{ended} {'soon after' if has_started else 'before'} it was ready{again}")
        logger.warning("%s, and starts again", ended)
        self._begin(index)

    def fail(self) -> None:
        """The engine has failed."""
        self.has_failed = True
        self.end()

    def end(self, number: int = signal.SIGTERM, *_: Any) -> None:
        """Let all drain and end; the second Ctrl-C, without waiting for running requests."""
        if is_urgent := self.is_ending and number == signal.SIGINT:
            self._deadline = monotonic() + URGENT_SECONDS
        self.is_ending = True
        for process in [*self._processes.values()]:
            if is_urgent and process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
            else:
                process.terminate()

    def join(self, seconds: float) -> None:
        """Wait for their end. Whichever has not ended by then, or soon after a second Ctrl-C, is killed."""
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
    """Serve until SIGTERM, Ctrl-C or a failure of the engine; the exit status of the process.

    listener: has reserved the address. prepare: is called before the model is loaded, while the fronts start already.
    on_start: is called when they listen.
    """
    with tempfile.TemporaryDirectory() as folder:  # it has the metrics that the fronts add up
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        fronts = Fronts(make_plan(model, settings, engine_settings, listener))
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
        try:
            fronts.begin()
            prepare()
            from nanovllm.llm import LLM  # imported lazily, as is all that needs PyTorch

            engine = LLM(model, **engine_settings)
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
        listener.close()  # else clients would wait for an answer until the last front has drained
        fronts.join(end_seconds)
        engine.exit()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(fronts.has_failed)

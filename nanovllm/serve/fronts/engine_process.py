"""The process of the engine, which starts the fronts and computes for them."""

import gc
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

from nanovllm.llm import LLM
from nanovllm.serve.fronts.channel import Channel, FromEngine, decode_from_front
from nanovllm.serve.fronts.front import FrontPlan, run_front
from nanovllm.serve.replicas.replica import Replica
from nanovllm.serve.settings import ServerSettings

logger = logging.getLogger("nanovllm")
START_SECONDS = 300.0
END_SECONDS = 10.0  # after the time in which running requests may end


class Session(Replica):
    """The requests of one front. A thread carries out what it asks for, and another one sends what is new."""

    orders_by_id = False  # ids of several fronts do not say which request came first: that is what the engine knows

    def __init__(self, engine: LLM, channel: Channel, on_failure: Callable[[], None]):
        self.attach(engine)
        self._channel, self._on_failure = channel, on_failure
        for work in (self._carry_out, self._report):
            threading.Thread(target=work, name="nanovllm-session", daemon=True).start()

    def _carry_out(self) -> None:
        try:
            while True:
                message = decode_from_front(self._channel.receive())
                self._submit(message.requests)
                if message.discarded:
                    self.discard(message.discarded)
                for request_id in message.aborted:
                    self.abort(request_id)
                if message.wants_stats:
                    self._channel.send(FromEngine(stats=self.stats()))
        except OSError:  # the front has ended
            self.discard([*self._requests])
            self.close()

    def _report(self) -> None:
        try:
            for deltas, finals, errors in self.new_reports():
                named = [(request_id, type(error).__name__, str(error)) for request_id, error in errors]
                self._channel.send(FromEngine(deltas, finals, named))
        except OSError:
            pass  # the front has ended
        except Exception as error:  # the engine has failed, or a message can't be encoded: nobody is to wait for ever
            if not self.is_closed:
                self._channel.send(FromEngine(failure=repr(error.__cause__ or error)))
                self._on_failure()


class Fronts:
    """The fronts of an engine. One that ends is started again; its requests are dropped, and the others go on."""

    def __init__(self, engine: LLM, plan: FrontPlan):
        self.engine, self._plan = engine, plan
        self._processes: dict[int, SpawnProcess] = {}  # by index
        self.is_ending = self.has_failed = False

    def start(self) -> None:
        """Start all, side by side. RuntimeError if one of them does not start."""
        for index, channel in enumerate([self._begin(index) for index in range(len(self._plan.num_live))]):
            self._connect(index, channel)

    def _begin(self, index: int) -> Channel:
        own_end, other_end = socket.socketpair()
        self._plan.num_live[index] = 0
        process = SpawnProcess(target=run_front, args=(self._plan, index, other_end), name=f"nanovllm-front-{index}")
        process.start()
        self._processes[index] = process
        other_end.close()
        return Channel(own_end)

    def _connect(self, index: int, channel: Channel) -> None:
        try:
            channel.receive(START_SECONDS)  # it is ready
        except OSError as error:
            if not self.is_ending:
                status = self._processes[index].exitcode
                raise RuntimeError(f"front {index} has not started (exit status {status})") from error
        Session(self.engine, channel, self.fail)

    def watch(self) -> None:
        """Start those again that end, until `end`."""
        while not self.is_ending:
            wait([process.sentinel for process in self._processes.values()], timeout=1.0)
            for index, process in self._processes.items():
                if not (process.is_alive() or self.is_ending):
                    logger.warning("%s has ended (exit status %s), and starts again", process.name, process.exitcode)
                    self._connect(index, self._begin(index))

    def fail(self) -> None:
        """The engine has failed."""
        self.has_failed = True
        self.end()

    def end(self, *_: Any) -> None:
        """Let all drain and end."""
        self.is_ending = True
        for process in self._processes.values():
            process.terminate()

    def join(self, seconds: float) -> None:
        for process in self._processes.values():
            process.join(seconds)
            process.kill()


def serve_by_fronts(
    model: str,
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    listener: socket.socket,
    on_start: Callable[[], None],
) -> int:
    """Serve until SIGTERM, Ctrl-C or a failure of the engine; the exit status of the process.

    listener: has reserved the address, at which the fronts listen. on_start: is called when they do.
    """
    with tempfile.TemporaryDirectory() as folder:  # it has the metrics that the fronts add up
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        num_fronts, port = settings.api_server_count, settings.port if settings.uds else listener.getsockname()[1]
        own = replace(settings, port=port, max_connections=max(1, settings.max_connections // num_fronts))
        engine = LLM(model, **engine_settings)
        gc.collect()
        gc.freeze()  # as in `run_server`
        num_live, shared = RawArray("q", num_fronts), listener if settings.uds else None
        fronts = Fronts(engine, FrontPlan(model, own, engine_settings, num_live, shared))
        handlers = {number: signal.signal(number, fronts.end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            fronts.start()
            on_start()
            fronts.watch()
        finally:
            fronts.end()
            fronts.join(settings.drain_seconds + END_SECONDS)
            engine.exit()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return int(fronts.has_failed)

"""The process of the engine, which starts the fronts and computes for them."""

import gc
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from time import monotonic
from typing import Any

from msgspec import DecodeError

from nanovllm.llm import LLM
from nanovllm.serve.fronts.channel import Channel, FromEngine, decode_from_front, decode_request
from nanovllm.serve.fronts.front import FrontPlan, run_front
from nanovllm.serve.replicas.messages import NewRequest
from nanovllm.serve.replicas.replica import Replica
from nanovllm.serve.settings import ServerSettings

logger = logging.getLogger("nanovllm")
START_SECONDS = 300.0
MAX_FAILED_STARTS = 10  # in a row, of a front that had to be started again
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
                self._submit(self._decoded(message.requests))
                if message.discarded:
                    self.discard(message.discarded)
                for request_id in message.aborted:
                    self.abort(request_id)
                if message.wants_stats:
                    self._channel.send(FromEngine(stats=self.stats()))
        except OSError:
            pass  # the front has ended
        except Exception:
            logger.exception("a message of a front can't be carried out, and the front is started again")
        finally:
            self.discard([*self._requests])
            self.close()
            self._channel.close()  # which ends a front that is still there

    def _decoded(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[NewRequest]:
        """Those that can be read; the others have failed."""
        for request_id, data in requests:
            try:
                yield decode_request(data)
            except DecodeError as error:
                self._report_error(request_id, error)

    def _report(self) -> None:
        try:
            for deltas, finals, errors in self.new_reports():
                named = [(request_id, type(error).__name__, _as_text(error)) for request_id, error in errors]
                try:
                    self._channel.send(FromEngine(deltas, finals, named))
                except OSError:
                    raise
                except Exception:
                    self._send_singly(FromEngine(deltas, finals, named))
        except OSError:
            pass  # the front has ended
        except Exception as error:  # the engine has failed: nobody is to wait for ever
            if not self.is_closed:
                self._channel.send(FromEngine(failure=repr(error.__cause__ or error)))
                self._on_failure()

    def _send_singly(self, message: FromEngine) -> None:
        """Send a message that can't be encoded, but for the requests that are the reason. These have failed."""
        parts = [(delta.request_id, FromEngine(deltas=[delta])) for delta in message.deltas]
        parts += [(final.request_id, FromEngine(finals=[final])) for final in message.finals]
        for request_id, part in parts:
            try:
                self._channel.send(part)
            except OSError:
                raise
            except Exception as error:
                logger.error("an answer can't be sent to its front", exc_info=error)
                self.discard([request_id])
                message.errors.append((request_id, "RuntimeError", _as_text(error)))
        self._channel.send(FromEngine(errors=message.errors))


def _as_text(error: Exception) -> str:
    """An error may quote half of a surrogate pair, which no message can have."""
    return str(error).encode(errors="replace").decode()


class Fronts:
    """The fronts of an engine. One that ends is started again; its requests are dropped, and the others go on."""

    def __init__(self, engine: LLM, plan: FrontPlan):
        self.engine, self._plan = engine, plan
        self._processes: dict[int, SpawnProcess] = {}  # by index, as those that start
        self._starting: dict[int, tuple[Channel, float]] = {}  # that are not ready yet, and until when they must be
        self._num_failures = [0] * len(plan.num_live)  # starts in a row that have failed
        self.is_ending = self.has_failed = False

    def start(self) -> None:
        """Start all, side by side. RuntimeError if one of them does not start."""
        for index in range(len(self._num_failures)):
            self._begin(index)
        while self._starting and not self.is_ending:
            self._turn(max_failures=1)

    def watch(self) -> None:
        """Start those again that end, until `end`. RuntimeError if that fails again and again."""
        while not self.is_ending:
            self._turn(MAX_FAILED_STARTS)

    def _begin(self, index: int) -> None:
        own_end, other_end = socket.socketpair()
        self._plan.num_live[index] = 0
        process = SpawnProcess(target=run_front, args=(self._plan, index, other_end), name=f"nanovllm-front-{index}")
        process.start()
        self._processes[index] = process
        other_end.close()
        self._starting[index] = Channel(own_end), monotonic() + START_SECONDS

    def _turn(self, max_failures: int) -> None:
        """Wait until a front is ready, or has ended. RuntimeError after so many starts in a row that have failed."""
        channels = [channel.fileno() for channel, _ in self._starting.values()]
        changed = wait([*channels, *(process.sentinel for process in self._processes.values())], timeout=1.0)
        for index, (channel, deadline) in [*self._starting.items()]:
            if (has_news := channel.fileno() in changed) and self._is_ready(channel):
                del self._starting[index]
                self._num_failures[index] = 0
                Session(self.engine, channel, self.fail)
            elif has_news or monotonic() > deadline:
                self._processes[index].kill()
                self._processes[index].join()
        for index, process in self._processes.items():
            if not (process.is_alive() or self.is_ending):
                self._begin_again(index, process, max_failures)

    @staticmethod
    def _is_ready(channel: Channel) -> bool:
        try:
            channel.receive()
        except OSError:  # it has ended
            return False
        return True

    def _begin_again(self, index: int, process: SpawnProcess, max_failures: int) -> None:
        ended = f"{process.name} has ended (exit status {process.exitcode})"
        if index in self._starting:
            self._starting.pop(index)[0].close()
            self._num_failures[index] += 1
            if self._num_failures[index] == max_failures:
                again = f", {max_failures} times in a row" if max_failures > 1 else ""
                raise RuntimeError(f"{ended} before it was ready{again}")
        logger.warning("%s, and starts again", ended)
        self._begin(index)

    def fail(self) -> None:
        """The engine has failed."""
        self.has_failed = True
        self.end()

    def end(self, *_: Any) -> None:
        """Let all drain and end."""
        self.is_ending = True
        for process in [*self._processes.values()]:
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
        except RuntimeError as error:
            logger.error("%s", error)
            fronts.fail()
        finally:
            fronts.end()
            fronts.join(settings.drain_seconds + END_SECONDS)
            engine.exit()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return int(fronts.has_failed)

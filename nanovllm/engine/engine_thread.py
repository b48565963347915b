"""The thread that owns an engine, executes commands and runs steps."""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from time import sleep
from typing import Any, TypeVar
from weakref import ref

from nanovllm.engine.collector import OutputCollector, StepOutput
from nanovllm.engine.engine import CLOSED, Engine, UnavailableError
from nanovllm.requests.request import Request

T = TypeVar("T")


class EngineThread:
    """Runs the steps of an engine as long as a collector needs them. No other thread changes the engine's state.

    Callers wait for outputs in other threads, so Ctrl-C interrupts a wait but never a step. Their calls are queued as
    commands, which this thread executes between steps. Signal handlers and finalizers may call `submit`, `abort`,
    `discard` and `exit` at any moment, because the interrupted code never holds a lock of the queues.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._output_processor = engine.output_processor
        # (command, its waiter: a collector, or the queue of a `call`); a command stays here until it is carried out
        self._commands: deque[tuple[Callable[[], object], Any]] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes the thread
        self._is_asleep = False
        self._watchers: list[ref[OutputCollector]] = []  # these fail when a rank is lost, even without requests
        engine.workers.on_failure = self._tell_watchers
        self._pid = os.getpid()
        self._is_closing = False
        self._has_ended = False
        # a daemon, because the interpreter joins all other threads before it runs the finalizer that ends this one
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- for all threads -----------------------------------------------------------------------------------------------

    def submit(self, requests: Collection[Request], collector: OutputCollector) -> None:
        """Queue requests whose outputs go to `collector`. Raises UnavailableError if no requests are accepted now."""
        self.check_open()
        self.engine.check_available()
        for request in requests:
            request.collector = collector
        self._post(partial(self._add, requests), collector)
        self._check_again(requests)

    def abort(self, request_id: int) -> None:
        """End a request before the next step. The request's collector gets all tokens so far."""
        self._post(partial(self._output_processor.abort, request_id))

    def discard(self, request_ids: Collection[int]) -> None:
        """End requests before the next step, without output."""
        self._post(partial(self._output_processor.discard, request_ids))

    def is_finished(self, collector: OutputCollector) -> bool:
        """Return whether `collector` is empty and will stay empty."""
        return self._is_closing or not (collector in self.queued() or collector.live or collector.is_ready)

    def queued(self) -> list[Any]:
        """Return the collectors and other objects that wait for queued commands."""
        return [waiter for _, waiter in [*self._commands]]

    def take(self, collector: OutputCollector) -> StepOutput:
        """Wait for outputs of a caller's requests, and return them. Raises RuntimeError if a step has failed."""
        self.check_may_wait()
        output = collector.take()
        self.wake()  # a full collector wants steps again
        return output

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` between two steps, and return its result.

        An error in `work` is treated like an error in a step. If the caller is the engine thread itself, as in a hook,
        `work` is called immediately.
        """
        if threading.current_thread() is self._thread:
            return work()
        self.check_open()
        result: SimpleQueue[Any] = SimpleQueue()
        self._post(lambda: result.put(work()), result)
        self.check_open()  # checked again: if the engine is not closing now, the thread will see the command
        if isinstance(value := result.get(), RuntimeError):
            raise value
        return value

    def watch(self, collector: OutputCollector) -> None:
        """Make `collector` fail when a rank is lost, even without requests."""
        self._watchers = [watcher for watcher in self._watchers if watcher() is not None] + [ref(collector)]
        self._post(self.engine.check_open, collector)  # a rank may be lost already

    def check_may_wait(self) -> None:
        """Raise RuntimeError if the caller is the engine thread, or the engine is not open."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the engine's own thread, in a hook or a finalizer: it can't wait for a step")
        self.check_open()

    def check_open(self) -> None:
        """Raise RuntimeError if the engine was closed, has failed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this process is a fork of {self._pid}, to which this engine belongs: start another engine here"
            )
        if self._is_closing:
            raise RuntimeError(CLOSED)
        self.engine.check_open()

    def wake(self) -> None:
        if self._is_asleep:
            self._bell.put(None)

    def exit(self) -> None:
        """Drop all requests, free the device's memory, and end the thread. Waiting callers get a RuntimeError.

        A finalizer may call `exit` in the engine thread or in the ranks' supervisor thread. In the engine thread and
        the supervisor thread, `exit` returns immediately, and the engine thread ends after its current step. In a
        forked child process, `exit` does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._is_closing = True
        self.wake()
        may_wait = threading.current_thread() not in (self._thread, self.engine.workers.supervisor)
        while may_wait and self._thread.ident is not None and not self._has_ended:  # None: it was never started
            sleep(0.001)  # not `join`, because before Python 3.13 an interrupted `join` marks the thread as ended

    def _check_again(self, requests: Collection[Request]) -> None:
        """Refuse requests that were queued while another thread closed the engine or made it unavailable."""
        self.check_open()  # if the engine is not closing now, the thread will see the command
        # a thread that adds a reason from now on sees these requests
        reasons = [*self.engine.unavailable.values()]
        if reasons and not any(request.is_admitted for request in requests):
            self.discard([request.request_id for request in requests])
            raise UnavailableError(reasons[0])

    def _tell_watchers(self) -> None:
        """Report a failed rank to the collectors that `watch` has stored. If no collector is stored, the next caller
        gets the error.
        """
        for watcher in self._watchers:
            if (collector := watcher()) is not None:
                self._post(self.engine.check_open, collector)

    def _post(self, command: Callable[[], object], waiter: Any = None) -> None:
        self._commands.append((command, waiter))
        self.wake()

    # -- for this thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Execute queued commands, then run a step or sleep, until the engine closes."""
        try:
            while not self._is_closing:
                try:
                    self._carry_out_commands()
                    if self._steps_are_wanted():
                        self.engine.check_open()
                        self.engine.step()
                    else:
                        self._sleep()
                except BaseException as error:
                    self._recover(error)
        finally:
            self._is_closing = True
            with ExitStack() as cleanup:  # calls the last callback first; an error in one does not stop the others
                cleanup.callback(setattr, self, "_has_ended", True)
                cleanup.callback(self.engine.exit)
                cleanup.callback(self.engine.drop_requests)
                for hook in self.engine.on_exit:
                    cleanup.callback(hook)
                cleanup.callback(self._fail_callers, CLOSED)

    def _carry_out_commands(self) -> None:
        for _ in range(len(self._commands)):
            self._commands[0][0]()  # no local variable, which would keep the command's requests alive
            self._commands.popleft()

    def _add(self, requests: Collection[Request]) -> None:
        self._output_processor.add(requests)
        is_available = not self.engine.unavailable
        for request in requests:
            request.is_admitted = is_available

    def _steps_are_wanted(self) -> bool:
        wanted = any(collector.wants_steps for collector in [*self._output_processor.collectors])
        return wanted and not self.engine.unavailable

    def _sleep(self) -> None:
        self._is_asleep = True
        # checked after the flag is set, because a caller that adds a command from here on rings the bell
        if not (self._commands or self._steps_are_wanted() or self._is_closing):
            self._bell.get()
        self._is_asleep = False

    def _recover(self, error: BaseException) -> None:
        """Drop all requests after an error in a step."""
        try:
            self.engine.drop_requests()
            if self.engine.workers.processes:
                self.engine.close_after(error)
        except RuntimeError as cause:
            error = cause
        finally:
            self._fail_callers(f"a step has failed, and all requests with it: {error!r}", error)

    def _fail_callers(self, message: str, cause: BaseException | None = None) -> None:
        commands = [*self._commands]
        for waiter in {*self._output_processor.collectors, *(waiter for _, waiter in commands)}:
            error = RuntimeError(message)
            error.__cause__ = cause
            if isinstance(waiter, OutputCollector):
                waiter.fail(error)
            elif waiter is not None:
                waiter.put(error)
        self._output_processor.collectors.clear()
        for _ in commands:  # done last, because until then `is_finished` reports these requests as pending
            self._commands.popleft()


class Submission:
    """Submits requests when a `with` block begins. Discards unfinished requests when the block ends, or when this
    object is garbage-collected.
    """

    _requests: Collection[Request] = ()

    def __init__(self, thread: EngineThread, requests: Collection[Request], collector: OutputCollector):
        self._thread, self._collector = thread, collector
        self._requests = requests

    def __enter__(self) -> None:
        self._thread.submit(self._requests, self._collector)

    def __exit__(self, *exception: object) -> None:
        if self._requests and not self._thread.is_finished(self._collector):
            self._thread.discard([request.request_id for request in self._requests])

    __del__ = __exit__

"""Which caller's thread runs the next step: the leader/followers pattern (Schmidt et al., PLoP 2000)."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType
from weakref import WeakSet

from nanovllm.engine.inbox import Inbox
from nanovllm.utils.interrupts import interrupts_held

MAX_WAIT = 0.1  # seconds; a thread that waits for another one's step sees Ctrl-C that late at most


class Leadership:
    """One thread at a time, the leader, uses the scheduler and the device; the engine has no thread of its own.

    A thread that needs output runs a step as the leader, or waits while another leader fills its inbox. To add or abort
    requests, it posts a command, which the current or the next leader executes between two steps.
    """

    def __init__(self, recover: Callable[[BaseException, Iterable[Inbox]], None]):
        """`recover(error, inboxes)` repairs the state after an error, which the reader of `inboxes` is about to get."""
        self._recover = recover
        self._commands: deque[Callable[[], None]] = deque()
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """No thread leads or waits: at the start, and in a forked child, where no other thread exists."""
        # always taken with interrupts held: one at the end of a `with` could leave it taken
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._leader: int | None = None
        self._num_urgent = 0  # threads waiting in `run` with is_urgent

    # -- what threads call ---------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Execute a command before the next step: now, or by the current leader. Signal handlers may call this."""
        self._commands.append(command)
        if not self._is_leading():
            self._lead(self._try_acquire, self.run_commands)

    def run(self, work: Callable[[], None], is_urgent: bool = False) -> None:
        """Do `work` as the leader. If it is urgent, no other thread runs a step before."""
        self._refuse_within_step()
        self._lead(lambda: self._acquire(is_urgent=is_urgent), work)

    def run_or_wait(self, work: Callable[[], None], inboxes: Iterable[Inbox]) -> None:
        """Do `work` as the leader, or return once another leader has put something into one of the inboxes."""
        self._refuse_within_step()
        self._lead(lambda: self._acquire(inboxes), work, inboxes)

    def run_commands(self) -> None:
        with interrupts_held():
            while self._commands:
                self._commands.popleft()()

    def clear_commands(self) -> None:
        self._commands.clear()

    def is_nested(self) -> bool:
        """Whether this thread is already inside `_lead`: in a signal handler, or in a destructor."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is Leadership._lead.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    # -- how a thread becomes the leader -------------------------------------------------------------------------------

    def _lead(self, acquire: Callable[[], bool], work: Callable[[], None], inboxes: Iterable[Inbox] = ()) -> None:
        """Do `work` if `acquire` makes this thread the leader; then execute commands that were posted meanwhile."""
        try:
            try:
                if not acquire():
                    return
                work()
                while not self._release():
                    self.run_commands()
            except BaseException as error:
                with interrupts_held():
                    if self._leader == get_ident():
                        self._recover(error, inboxes)
                raise
            finally:
                self._resign()
        finally:
            if self._leader == get_ident():  # an interrupt has kept the first call from beginning
                self._resign()

    def _resign(self) -> None:
        """Stop leading, if this thread does, and wake those that wait."""
        with interrupts_held(), self.lock:
            if self._leader == get_ident():
                self._leader = None
            self._changed.notify_all()

    def _try_acquire(self) -> bool:
        with interrupts_held(), self.lock:
            return self._lead_if_free()

    def _lead_if_free(self, is_urgent: bool = False) -> bool:
        """For holders of the lock."""
        # this thread may still be recorded as the leader, if an interrupt kept it from releasing
        if self._leader not in (None, get_ident()) or (self._num_urgent and not is_urgent):
            return False
        self._leader = get_ident()
        return True

    def _acquire(self, inboxes: Iterable[Inbox] = (), is_urgent: bool = False) -> bool:
        """Wait until this thread is the leader, or (False) until one of the inboxes is ready or Ctrl-C was pressed."""
        with interrupts_held() as held, self.lock:
            self._num_urgent += is_urgent
            try:
                while not held and not any(inbox.is_ready for inbox in inboxes):
                    if self._lead_if_free(is_urgent):
                        return True
                    self._changed.wait(MAX_WAIT)
                return False
            finally:
                self._num_urgent -= is_urgent

    def _release(self) -> bool:
        """Stop leading, unless commands are queued: the threads that posted them saw a leader and rely on it."""
        with interrupts_held(), self.lock:
            if self._commands:
                return False
            self._leader = None
        return True

    def _is_leading(self) -> bool:
        return self._leader == get_ident() and self.is_nested()

    def _refuse_within_step(self) -> None:
        if self._is_leading():
            raise RuntimeError(
                "this thread is in the middle of a step: only add_request, abort and exit may be called here"
            )


_all: WeakSet[Leadership] = WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Leadership.reset, _all)))

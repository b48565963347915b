"""Which caller's thread runs the next step: the leader/followers pattern (Schmidt et al., PLoP 2000)."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from weakref import WeakSet

from nanovllm.engine.request import Inbox
from nanovllm.utils.interrupts import interrupts_held


class Leadership:
    """One thread at a time, the leader, touches the scheduler and the device; the engine has no thread of its own.

    Whoever waits for an answer leads, or waits while another thread does and fills its inbox. What is not urgent is posted
    as a command, which the leader, or the next one, carries out between two steps.
    """

    def __init__(self, recover: Callable[[BaseException, Iterable[Inbox]], None]):
        """`recover(error, inboxes)` repairs what an error left behind; then it is raised to the leader of these inboxes."""
        self._recover = recover
        self._commands: deque[Callable[[], None]] = deque()
        self.release()
        _all.add(self)

    def release(self) -> None:
        """Nobody leads or waits: at the start, and in a forked child, where no other thread exists."""
        # Held briefly, by `with self.lock`: an interrupt inside Condition.__exit__ would leave the lock taken.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._leader: int | None = None
        self._num_urgent = 0  # threads that are to lead before those that run steps

    def post(self, command: Callable[[], None]) -> None:
        """Have it carried out before the next step: at once, unless there is a leader. Signal handlers may call this."""
        self._commands.append(command)
        self.lead(self.take_commands)

    def forget_commands(self) -> None:
        self._commands.clear()

    def take_commands(self) -> None:
        with interrupts_held():
            while self._commands:
                self._commands.popleft()()

    def lead(self, work: Callable[[], None], inboxes: Iterable[Inbox] | None = None, is_urgent: bool = False) -> bool:
        """Do what only the leader may do; whether it was done.

        While there is another leader, wait until there is none, or until something is in one of the inboxes; without
        inboxes return at once. What is urgent comes before the next step of other threads.
        """
        if self._leader == get_ident() and self.is_nested(depth=2):
            if inboxes is None:
                return False
            raise RuntimeError(
                "this thread is in the middle of a step: only add_request, abort and exit may be called here"
            )
        try:
            if not self._become_leader(inboxes, is_urgent):
                return False
            work()
            while not self._resign():
                self.take_commands()
        except BaseException as error:
            with interrupts_held():
                if self._leader == get_ident():
                    self._recover(error, inboxes or ())
            raise
        finally:
            with interrupts_held(), self.lock:
                if self._leader == get_ident():
                    self._leader = None
                self._changed.notify_all()
        return True

    def _become_leader(self, inboxes: Iterable[Inbox] | None, is_urgent: bool) -> bool:
        with self.lock:
            self._num_urgent += is_urgent
            try:
                while not any(inbox.is_ready for inbox in inboxes or ()):
                    # if this thread is still recorded as the leader, an interrupt kept it from resigning
                    if self._leader in (None, get_ident()) and (is_urgent or not self._num_urgent):
                        self._leader = get_ident()
                        return True
                    if inboxes is None:
                        return False
                    self._changed.wait()
                return False
            finally:
                self._num_urgent -= is_urgent

    def _resign(self) -> bool:
        """Give up leadership, unless commands are queued: their posters saw a leader and left them to it."""
        with interrupts_held(), self.lock:
            if self._commands:
                return False
            self._leader = None
        return True

    def is_nested(self, depth: int = 1) -> bool:
        """Whether this thread is within `lead` already: in a signal handler, or as a stream is garbage-collected."""
        frame = sys._getframe(depth)
        while frame is not None:
            if frame.f_code is Leadership.lead.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False


_all: WeakSet[Leadership] = WeakSet()
os.register_at_fork(after_in_child=lambda: [leadership.release() for leadership in _all])

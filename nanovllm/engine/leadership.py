"""Which caller's thread runs the next step: the leader/followers pattern (Schmidt et al., PLoP 2000)."""
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident

from nanovllm.engine.request import Inbox
from nanovllm.utils.interrupts import interrupts_held


class Leadership:
    """One thread at a time, the leader, touches the scheduler and the device; there is no thread of the engine's own.

    Whoever waits for an answer leads, or waits while another thread does and fills its inbox. What is not urgent is posted
    as a command, which the leader, or the next one, carries out between two steps.
    """

    def __init__(self, recover: Callable[[BaseException, Iterable[Inbox]], None]):
        """`recover(error, inboxes)` repairs what an error left behind, before it is raised to the leader of these inboxes."""
        self._recover = recover
        self._commands: deque[Callable[[], None]] = deque()
        # held for moments only; `with` on the lock itself, as an interrupt may begin Condition.__exit__ and not let it end
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
        while self._commands:
            self._commands.popleft()()

    def lead(
        self, work: Callable[[], None], inboxes: Iterable[Inbox] | None = None, is_urgent: bool = False
    ) -> bool:
        """Do what only the leader may do; whether it was done.

        While there is another leader, wait until there is none, or until something is in one of the inboxes; without
        inboxes return at once. What is urgent comes before the next step of other threads.
        """
        with self.lock:
            if self._leader == get_ident() and self._is_nested():
                if inboxes is None:
                    return False
                raise RuntimeError("this thread is in the middle of a step: only add_request and abort may be called here")
            self._num_urgent += is_urgent
            try:
                # a leadership of its own is one that an interrupt kept it from giving up
                while self._leader not in (None, get_ident()) or (self._num_urgent and not is_urgent):
                    if inboxes is None:
                        return False
                    self._changed.wait()
                    if any(inbox.is_ready for inbox in inboxes):
                        return False
                self._leader = get_ident()
            finally:
                self._num_urgent -= is_urgent
        try:
            work()
            while not self._retire():
                self.take_commands()
        except BaseException as error:
            with interrupts_held():
                self._recover(error, inboxes or ())
            raise
        finally:
            if self._leader == get_ident():
                self._leader = None
                with self.lock:
                    self._changed.notify_all()
        return True

    def _retire(self) -> bool:
        """Lead no more, unless there are commands: whoever posted them has seen a leader and gone."""
        with self.lock:
            if self._commands:
                return False
            self._leader = None
            self._changed.notify_all()
        return True

    def _is_nested(self) -> bool:
        """Whether `lead` was called from within itself: by a signal handler, or the end of a stream that is collected."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is Leadership.lead.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

"""Two buffers for pipelining."""

from typing import Generic, TypeVar

T = TypeVar("T")


class DoubleBuffer(Generic[T]):
    """Alternates between two buffers: one buffer is filled while the other is in use."""

    def __init__(self, first: T, second: T):
        self._buffers = first, second
        self.buffer_index = 0

    @property
    def current(self) -> T:
        return self._buffers[self.buffer_index]

    def advance(self) -> T:
        """Make the other buffer the current buffer. Return the buffer that was current before."""
        used = self.current
        self.buffer_index = 1 - self.buffer_index
        return used

    def reset(self) -> None:
        self.buffer_index = 0

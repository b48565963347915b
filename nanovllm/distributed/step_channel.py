"""How the other ranks get the steps that rank 0 has prepared."""

import mmap
import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np

from nanovllm.engine.batch import BatchShape

PLACES = 2  # one that is read, and one that is written
HEADER = len(BatchShape._fields)


class StepChannel:
    """Rank 0's end: a ring of flat int32 arrays in shared memory.

    A place holds a batch's shape and its buffer. Each reader has two semaphores, which count the places that are free
    for it and those that are filled: nothing is overwritten before all have read it, readers sleep while there is
    nothing to read, and a reader that was killed never blocks rank 0 in raising its semaphore. The memory (a file
    without a name) and the semaphores (eventfds) are file descriptors that readers inherit: no name is left behind.
    """

    def __init__(self, room: int, num_readers: int):
        """`room` is the largest batch's, in words. OSError where there is no space for it in /dev/shm."""
        self._free, self._filled = [], []
        self._file = tempfile.TemporaryFile(dir="/dev/shm", buffering=0)
        self._place_size = HEADER + room
        os.posix_fallocate(self._file.fileno(), 0, PLACES * self._place_size * 4)
        self._places = _places(self._file.fileno(), self._place_size)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        self._free = [os.eventfd(PLACES, flags) for _ in range(num_readers)]
        self._filled = [os.eventfd(0, flags) for _ in range(num_readers)]

    def fds_of(self, reader: int) -> tuple[int, int, int]:
        """File descriptors of the memory, of the places that are free for a reader, and of those filled for it."""
        return self._file.fileno(), self._free[reader], self._filled[reader]

    def send(self, shape: tuple[int, ...], words: np.ndarray, timeout: float) -> None:
        """RuntimeError where a reader has not read for `timeout` seconds; then no reader gets this step."""
        for rank, free in enumerate(self._free, 1):
            poll = select.poll()
            poll.register(free, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise RuntimeError(f"rank {rank} has taken no step for {timeout:.0f} s")
        for free in self._free:
            os.eventfd_read(free)
        place = next(self._places)
        place[:HEADER] = shape
        place[HEADER : HEADER + len(words)] = words
        for filled in self._filled:
            os.eventfd_write(filled, 1)

    def release(self) -> None:
        """Wake a `send` that waits for readers, as they are gone."""
        for free in self._free:
            os.eventfd_write(free, PLACES)

    def __del__(self):  # and no `close`: while a thread is in `send`, no other may give its descriptors away
        for fd in self._free + self._filled:
            os.close(fd)


class StepReader:
    """The end of another rank, which has inherited the file descriptors `StepChannel.fds_of` itself."""

    def __init__(self, fds: tuple[int, int, int], room: int):
        memory, self._free, self._filled = fds
        self._places = _places(memory, HEADER + room)

    @contextmanager
    def receive(self) -> Iterator[tuple[BatchShape, np.ndarray]]:
        """The next shape, and the words that begin with the batch's; they are free again when the block ends."""
        os.eventfd_read(self._filled)
        place = next(self._places)
        yield BatchShape(*place[:HEADER].tolist()), place[HEADER:]
        os.eventfd_write(self._free, 1)


def _places(fd: int, place_size: int) -> Iterator[np.ndarray]:
    memory = mmap.mmap(fd, PLACES * place_size * 4)
    return cycle(np.frombuffer(memory, np.int32).reshape(PLACES, place_size))

"""Sends steps from rank 0 to the other ranks, through a ring of buffers in shared memory."""

import mmap
import os
import pickle
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np

from nanovllm.batches.batch import BatchShape

NUM_BUFFERS = 2  # one is read while the other is written
HEADER = 512  # words for the size of the pickled shape in bytes, followed by the pickled shape


class StepChannel:
    """Rank 0's end of the channel.

    A buffer is an int32 array that contains the pickled shape of a batch, followed by the batch. Each reader has two
    semaphores. `free` counts the buffers that the reader has finished reading, and `filled` counts the buffers that the
    reader must still read. Because of the semaphores, no buffer is overwritten too early, and readers sleep while there
    is nothing to read. Rank 0 can always increment a semaphore, even if a reader was killed. Child processes inherit
    the memory (an unnamed file) and the semaphores (eventfds), so no named object can outlive the processes.
    """

    def __init__(self, capacity: int, num_readers: int):
        """`capacity` is the size of the largest batch in int32 words. Raises OSError if /dev/shm is too small."""
        self._free: list[int] = []
        self._filled: list[int] = []
        self._file = tempfile.TemporaryFile(dir="/dev/shm", buffering=0)
        self._buffer_size = HEADER + capacity
        os.posix_fallocate(self._file.fileno(), 0, NUM_BUFFERS * self._buffer_size * 4)
        self._buffers = _buffers(self._file.fileno(), self._buffer_size)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        self._free = [os.eventfd(NUM_BUFFERS, flags) for _ in range(num_readers)]
        self._filled = [os.eventfd(0, flags) for _ in range(num_readers)]

    def fds_of(self, reader: int) -> tuple[int, int, int]:
        """Return the file descriptors of the memory and of a reader's semaphores (free, filled)."""
        return self._file.fileno(), self._free[reader], self._filled[reader]

    def send(self, shape: Any, words: np.ndarray, timeout: float) -> None:
        """Send a batch's BatchShape and words. In other messages, `shape` is any object that can be pickled.

        Raises RuntimeError if a reader frees no buffer for `timeout` seconds, and ValueError if the pickled shape does
        not fit into the header. If an error is raised, no reader gets the message.
        """
        pickled = pickle.dumps(tuple(shape) if isinstance(shape, BatchShape) else shape)
        if len(pickled) > 4 * (HEADER - 1):
            raise ValueError(f"a message's header has {len(pickled)} bytes: must be at most {4 * (HEADER - 1)}")
        for rank, free in enumerate(self._free, 1):
            poll = select.poll()
            poll.register(free, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise RuntimeError(f"rank {rank} has taken no step for {timeout:.0f} s")
        for free in self._free:
            os.eventfd_read(free)
        buffer = next(self._buffers)
        buffer[0] = len(pickled)
        buffer.view(np.uint8)[4 : 4 + len(pickled)] = np.frombuffer(pickled, np.uint8)
        buffer[HEADER : HEADER + len(words)] = words
        for filled in self._filled:
            os.eventfd_write(filled, 1)

    def release(self) -> None:
        """Let `send` stop waiting, because the readers are gone."""
        for free in self._free:
            os.eventfd_write(free, NUM_BUFFERS)

    def __del__(self):  # not `close`, because the descriptors must stay open while another thread is in `send`
        for fd in self._free + self._filled:
            os.close(fd)


class StepReader:
    """Another rank's end of the channel. That rank has inherited the file descriptors of `StepChannel.fds_of`."""

    def __init__(self, fds: tuple[int, int, int], capacity: int):
        memory, self._free, self._filled = fds
        self._buffers = _buffers(memory, HEADER + capacity)

    @contextmanager
    def receive(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the next message as a pair (shape, all words up to the end of the buffer). Then free the buffer."""
        os.eventfd_read(self._filled)
        buffer = next(self._buffers)
        shape = pickle.loads(buffer.view(np.uint8)[4 : 4 + buffer[0]])
        yield BatchShape(*shape) if type(shape) is tuple else shape, buffer[HEADER:]
        os.eventfd_write(self._free, 1)


def _buffers(fd: int, buffer_size: int) -> Iterator[np.ndarray]:
    memory = mmap.mmap(fd, NUM_BUFFERS * buffer_size * 4)
    return cycle(np.frombuffer(memory, np.int32).reshape(NUM_BUFFERS, buffer_size))

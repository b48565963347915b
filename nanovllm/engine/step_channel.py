"""How the other ranks get the steps that rank 0 has prepared."""
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from nanovllm.engine.batch import BatchShape

PLACES = 2  # one that is read, and one that is written
HEADER = len(BatchShape._fields)
STOP = (0,) * HEADER  # a shape that no step has


class StepChannel:
    """The batches of rank 0 on their way to the others: a ring of flat int32 arrays in shared memory.

    A place holds a batch's shape and its buffer. Each reader has two semaphores, which count the places that are free for
    it and those that are filled: nothing is overwritten before all have read it, readers sleep while there is nothing
    to read, and a reader that was killed keeps nobody from setting its semaphore.
    """

    def __init__(self, context, room: int, num_readers: int):
        """`room` is the largest batch's, in words."""
        self.place_size = HEADER + room
        name = f"nanovllm-{secrets.token_hex(8)}"
        self.memory = SharedMemory(name, create=True, size=PLACES * self.place_size * 4)  # of mode 0600
        self.free = [context.Semaphore(PLACES) for _ in range(num_readers)]
        self.filled = [context.Semaphore(0) for _ in range(num_readers)]
        self._turn = 0
        self._has_name = True

    def _next_place(self) -> np.ndarray:
        begin = self._turn * self.place_size * 4
        self._turn = (self._turn + 1) % PLACES
        return np.frombuffer(self.memory.buf, np.int32, self.place_size, begin)

    def send(self, shape: tuple[int, ...], words: np.ndarray, timeout: float) -> None:
        """RuntimeError where a reader has not read for `timeout` seconds."""
        for rank, free in enumerate(self.free, 1):
            if not free.acquire(timeout=timeout):
                raise RuntimeError(f"rank {rank} has taken no step for {timeout:.0f} s")
        place = self._next_place()
        place[:HEADER] = shape
        place[HEADER : HEADER + len(words)] = words
        for filled in self.filled:
            filled.release()

    @contextmanager
    def receive(self, reader: int) -> Iterator[tuple[BatchShape, np.ndarray]]:
        """The next shape, and the words that begin with the batch's; they are free again when the block ends."""
        self.filled[reader].acquire()
        place = self._next_place()
        yield BatchShape(*place[:HEADER].tolist()), place[HEADER:]
        self.free[reader].release()

    def unlink(self) -> None:
        """Take its name away: who has it keeps it, and nothing can leave it behind."""
        if self._has_name:
            self.memory.unlink()
            self._has_name = False

    def close(self) -> None:
        self.unlink()
        with suppress(BufferError):  # an error may still hold a view of it
            self.memory.close()

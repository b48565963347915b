"""Stores a rank's part of each block in host memory. Copies blocks between host memory and the rank's device."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ctypes import Structure, byref, c_int, c_size_t, c_void_p
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np
import torch

from nanovllm.cache.block_copies import block_parts
from nanovllm.tiers.shared_rows import SharedRows
from nanovllm.utils.cuda_driver import call_driver

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

ALIGNMENT = 16  # bytes; a view with another dtype must be aligned
HOST, DEVICE, MAX_PITCH = 1, 2, 2**31 - 1  # values of CUmemorytype, and a pitch that all GPUs allow


class _Side(Structure):
    _fields_ = [
        *(("x", c_size_t), ("y", c_size_t), ("memory_type", c_int), ("host", c_void_p), ("device", c_void_p)),
        *(("array", c_void_p), ("pitch", c_size_t)),
    ]

    @classmethod
    def of(cls, part: torch.Tensor, height: int) -> "_Side":
        pitch = part.stride(1) * part.itemsize if height > 1 else part.nbytes
        if part.is_cpu:
            return cls(memory_type=HOST, host=part.data_ptr(), pitch=pitch)
        return cls(memory_type=DEVICE, device=part.data_ptr(), pitch=pitch)


class Memcpy2D(Structure):
    """Describes a copy for the CUDA driver (CUDA_MEMCPY2D): `height` rows of `width` bytes.

    The starts of rows are `pitch` bytes apart.
    """

    _fields_ = [("source", _Side), ("target", _Side), ("width", c_size_t), ("height", c_size_t)]

    @classmethod
    def of(cls, target: torch.Tensor, source: torch.Tensor) -> "Memcpy2D":
        """Describe a copy between two parts of the same shape. In each part, layers must be at equal distances."""
        height = 1 if source.dim() == 1 else source.shape[0] * source.shape[1]
        return cls(_Side.of(source, height), _Side.of(target, height), source.nbytes // height, height)


class HostBlocks:
    """Stores each block in one row of bytes. A row contains token ids, and the keys and values of all layers.

    A recurrent state is larger than a block, and takes several rows. On a CPU, copies end immediately. Each column of
    `copies` [2, C] is a pair: the id of a block or state, and a row. The pairs of a state are adjacent. Each call of
    `put` or `get` has a `number`. `put` and `get` raise OSError if a copy can't begin.
    """

    def __init__(self, runner: "ModelRunner", num_rows: int, shared: SharedRows | None = None):
        """Use the memory `shared`, or allocate memory if it is None.

        Raises RuntimeError if there is too little memory.
        """
        self.shared = shared
        if shared is None:
            self.rows = torch.empty((num_rows, row_bytes(runner)), dtype=torch.uint8, device="cpu")
        else:
            self.rows = shared.rows[runner.tp.rank]

    @property
    def rows_of_ranks(self) -> torch.Tensor:
        """Return rows [ranks, rows, bytes] uint8. If the memory is not shared, only this rank's rows are returned."""
        return self.rows[None] if self.shared is None else self.shared.rows

    def put(self, runner: "ModelRunner", number: int, copies: np.ndarray) -> None:
        self._copy_all(runner, number, ((stored, part) for part, stored in self._parts(runner, copies)))

    def get(self, runner: "ModelRunner", number: int, copies: np.ndarray) -> None:
        self._copy_all(runner, number, self._parts(runner, copies))

    def num_rows_of(self, runner: "ModelRunner", block_id: int) -> int:
        """Return how many rows a block or a recurrent state takes."""
        return len(rows_of(runner, block_id))

    def has_ended(self, number: int) -> bool:
        return True

    def end_of_copies(self, num_copies: int) -> Callable[[], bool]:
        """Return a function that tells whether all ranks have completed the first `num_copies` copies.

        If there is one rank, the function ignores copies to the device, which `has_ended` checks.
        """
        return (lambda: True) if self.shared is None else partial(self.shared.have_ended, num_copies)

    def order_steps(self, numbers: list[int]) -> None:
        """Make all later steps wait for the copies with these numbers."""

    def _copy_all(self, runner: "ModelRunner", number: int, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Make a copy, whose parts are pairs (target, source)."""
        try:
            for target, source in pairs:
                self._copy(target, source)
        finally:  # after an error, a part of the copy may run
            self._end_copy(runner, number)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def _end_copy(self, runner: "ModelRunner", number: int) -> None:
        """If rank 0 uses this rank's rows, tell rank 0 when this copy and all earlier copies have ended."""
        if self.shared is not None:
            self.shared.report(number + 1, runner.device)

    def _parts(self, runner: "ModelRunner", copies: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of a block or state in `copies`, yield a view on the device and a view in host memory."""
        for block_id, pairs in groupby(copies.T.tolist(), key=lambda pair: pair[0]):
            for parts, (_, row) in zip(rows_of(runner, block_id), pairs, strict=True):
                end = 0
                for part in parts:
                    stored = self.rows[row, end : end + part.nbytes]
                    yield part, stored.view(part.dtype).view(part.shape)
                    end += _aligned(part.nbytes)


class PinnedBlocks(HostBlocks):
    """Stores blocks in pinned memory. Two CUDA streams, one for each direction, copy blocks while steps run."""

    def __init__(self, runner: "ModelRunner", num_rows: int, shared: SharedRows | None = None):
        self.shared, num_bytes = shared, num_rows * row_bytes(runner)
        memory = allocate(num_bytes) if shared is None else shared.part.zero_()
        self.rows = memory[:num_bytes].view(num_rows, -1)
        # not `pin_memory`, which rounds the size up to a power of two
        call_driver("cuMemHostRegister_v2", address := c_void_p(memory.data_ptr()), c_size_t(memory.nbytes), 0)
        finalize(self, _unpin, memory, address, runner.device).atexit = False
        self._out, self._in = torch.cuda.Stream(runner.device), torch.cuda.Stream(runner.device)
        self._events: dict[int, torch.cuda.Event] = {}  # by number of the copy, if the copy may not have ended

    def put(self, runner: "ModelRunner", number: int, copies: np.ndarray) -> None:
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            super().put(runner, number, copies)

    def get(self, runner: "ModelRunner", number: int, copies: np.ndarray) -> None:
        self._in.wait_stream(torch.cuda.current_stream())
        self._in.wait_stream(self._out)  # `_out` may still read these blocks or write these rows
        with torch.cuda.stream(self._in):
            super().get(runner, number, copies)

    def has_ended(self, number: int) -> bool:
        return number not in self._events or self._events[number].query()

    def end_of_copies(self, num_copies: int) -> Callable[[], bool]:
        return self._out.record_event().query if self.shared is None else super().end_of_copies(num_copies)

    def order_steps(self, numbers: list[int]) -> None:
        for number in numbers:
            if (event := self._events.pop(number, None)) is not None:
                torch.cuda.current_stream().wait_event(event)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a part of a block with a copy engine of the GPU, which leaves all multiprocessors to the steps.

        `copy_` would also run a kernel that gathers or scatters the layers on the device.
        """
        copy = Memcpy2D.of(target, source)
        if (
            copy.height > 1 and max(copy.source.pitch, copy.target.pitch) > MAX_PITCH
        ):  # the layers are too far apart for a single copy
            for layers in zip(target.view(copy.height, -1), source.view(copy.height, -1)):
                self._copy(*layers)
        else:
            try:
                call_driver("cuMemcpy2DAsync_v2", byref(copy), c_void_p(torch.cuda.current_stream().cuda_stream))
            except RuntimeError as error:
                raise OSError(f"the copy could not begin: {error}") from error

    def _end_copy(self, runner: "ModelRunner", number: int) -> None:
        self._events = {i: event for i, event in self._events.items() if not event.query()}
        self._events[number] = torch.cuda.current_stream().record_event()  # the stream of this copy
        if self.shared is not None:
            self._in.wait_stream(self._out)  # then `_in` follows all earlier copies
            with torch.cuda.stream(self._in):
                super()._end_copy(runner, number)


class HostCall(NamedTuple):
    """Describes a call of a method that every rank makes. Rank 0 sends the HostCall as a message, between two steps.

    The action "allocate" sends the `pid` and `fd` of SharedRows as `words`. If each rank allocates its own memory,
    `words` is empty.
    """

    action: str  # "allocate", or a method of HostBlocks
    number: int  # how many rows to allocate, or the number of a copy
    num_words: int

    def receive(self, words: np.ndarray, runner: "ModelRunner", incoming: dict[Any, Any]) -> None:
        words = words[: self.num_words].copy()
        with runner.on_device(), torch.inference_mode():
            if self.action == "allocate":
                blocks = PinnedBlocks if runner.device.type == "cuda" else HostBlocks
                shared = SharedRows(runner.tp, self.number, row_bytes(runner), *words) if len(words) else None
                runner.host_blocks = blocks(runner, self.number, shared)
                runner.min_of_ranks(0)  # rank 0 waits until all ranks have allocated their memory
            elif self.action == "order_steps":
                runner.host_blocks.order_steps(words.tolist())
            else:
                getattr(runner.host_blocks, self.action)(runner, self.number, words.reshape(2, -1))


def allocate(num_bytes: int) -> torch.Tensor:
    """Return zeros in huge pages, if the host supports huge pages. Pinning small pages takes about a second per GiB."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()  # `zero_` touches the pages with several threads


def _unpin(memory: torch.Tensor, address: c_void_p, device: torch.device) -> None:
    """Unpin `memory`. The argument keeps the tensor alive until `_unpin` is called."""
    torch.cuda.synchronize(device)
    call_driver("cuMemHostUnregister", address)


def row_bytes(runner: "ModelRunner") -> int:
    """Return the size of a row in bytes. A row contains this rank's part of a block."""
    parts = block_parts(runner._cached_token_ids, runner.caches, 0)
    return sum(_aligned(part.nbytes) for part in parts)


def rows_of(runner: "ModelRunner", block_id: int) -> list[list[torch.Tensor]]:
    """Return a list of parts for each row of host memory that a block or a state takes.

    The parts are views of what this rank's device stores for the block or state.

    The parts of a recurrent state have the shape [1, layers, N], and are cut along N into pieces that fit into rows.
    """
    parts = block_parts(runner._cached_token_ids, runner.caches, block_id)
    if block_id < len(runner._cached_token_ids):
        return [parts]
    rows: list[list[torch.Tensor]] = []
    num_left = 0  # bytes in the last row
    for part in parts:
        columns = part.view(1, part.shape[1], -1)
        while columns.shape[2]:
            width = num_left // (ALIGNMENT * part.shape[1]) * (ALIGNMENT // part.itemsize)
            if width:
                rows[-1].append(columns[:, :, :width])
                columns = columns[:, :, width:]
                num_left -= _aligned(rows[-1][-1].nbytes)
            else:
                rows.append([])
                num_left = row_bytes(runner)
    return rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

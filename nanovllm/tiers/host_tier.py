"""Implements the tier of the prefix cache in host memory. The setting `swap_space` is the tier's size."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nanovllm.engine.engine import Engine
from nanovllm.tiers.connector import CachedBlock, Connector
from nanovllm.tiers.host_blocks import HostCall, row_bytes, rows_of
from nanovllm.tiers.tiered_blocks import install_connector

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


T = TypeVar("T", bound="HostTier")


@dataclass(slots=True)
class Entry:
    """Describes stored contents. If `num_reads` is not 0, the rows are being read, and must not be overwritten."""

    token_ids: list[int]
    rows: list[int]
    num_reads: int = 0


class HostTier(Connector):
    """Stores blocks in the host's memory. If the memory is full, drops the least recently used blocks.

    Each rank stores its part of a block in the same row. A recurrent state takes several rows. Rank 0 chooses the rows.
    Rank 0 sends descriptions of copies to the other ranks, in the order of the steps. The steps of a rank wait only for
    the copies of this rank.
    """

    def __init__(self, engine: Engine, num_rows: int):
        self._engine, self._num_rows, self._num_copies, self._num_stored = engine, num_rows, 0, 0
        self.clear()
        self._copies: dict[int, int] = {}  # block id -> number of its last copy, if no step waits for this copy yet
        self._reads: dict[int, list[Entry]] = {}  # by number of a copy to the device: the entries that it reads
        self._allocate()

    def contains(self, block_hash: int, token_ids: list[int]) -> bool:
        entry = self._entries.get(block_hash)
        if entry is None or entry.token_ids != token_ids:
            return False
        self._entries.move_to_end(block_hash)  # else, blocks that the device evicts for it might replace it
        return True

    def put(self, blocks: list[CachedBlock]) -> None:
        copies, new = [], dict[int, Entry]()
        for block in blocks:
            if block.block_hash in self._entries:  # of two blocks with equal hashes, the first one stays
                self._entries.move_to_end(block.block_hash)
            elif rows := self._pop_rows(len(ids := self._ids_of_rows(block))):
                self._entries[block.block_hash] = new[block.block_hash] = Entry(block.token_ids, rows)
                copies += zip(ids, rows)
        if copies:
            try:
                self._copy("put", copies)
            except OSError:
                for block_hash, entry in new.items():
                    if self._entries.get(block_hash) is entry:  # otherwise, a later block has its rows
                        self._free_rows += self._entries.pop(block_hash).rows
                raise
        self._num_stored += sum(len(block.block_ids) for block in blocks if block.block_hash in new)

    def get(self, blocks: list[CachedBlock]) -> Callable[[], bool]:
        if not all(self.contains(block.block_hash, block.token_ids) for block in blocks):
            raise OSError("host memory is too small for the blocks that leave the device and those that come back")
        entries = [self._entries[block.block_hash] for block in blocks]
        pairs = zip(blocks, entries)
        copies = [pair for block, entry in pairs for pair in zip(self._ids_of_rows(block), entry.rows, strict=True)]
        number = self._copy("get", copies)
        self._reads[number] = entries
        for entry in entries:
            entry.num_reads += 1
        for block in reversed(blocks):  # move the first blocks of a text last, because they are used most often
            self._entries.move_to_end(block.block_hash)
        return partial(self._runner.host_blocks.has_ended, number)

    def order_steps(self, block_ids: list[int]) -> None:
        numbers = {self._copies.pop(block_id, -1) for block_id in block_ids} - {-1}
        if not numbers:
            return
        self._call("order_steps", 0, np.array(sorted(numbers), np.int32))
        for entry in (entry for number in numbers for entry in self._reads.pop(number, ())):
            entry.num_reads -= 1  # steps now wait for this copy, and later copies to the row wait for these steps

    def clear(self) -> None:
        self._free_rows = [*reversed(range(self._num_rows))]
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by hash; the least recently used entry is first

    def usage(self) -> dict[str, int]:
        num_used = self._num_rows - len(self._free_rows)
        return {"host_rows": self._num_rows, "host_rows_used": num_used, "stored_blocks": self._num_stored}

    @property
    def _runner(self) -> "ModelRunner":
        assert self._engine.model_runner is not None, "the engine is open"
        return self._engine.model_runner

    def _allocate(self) -> None:
        self._call("allocate", self._num_rows, np.empty(0, np.int32))

    def _ids_of_rows(self, block: CachedBlock) -> list[int]:
        """For each row of `block`, return the id of the block or state that the row stores."""
        num_rows_of = self._runner.host_blocks.num_rows_of
        return [i for i in block.block_ids for _ in range(num_rows_of(self._runner, i))]

    def _pop_rows(self, num_rows: int) -> list[int]:
        """Return free rows.

        If too few rows are free, drop the least recently used entries, except entries that are being read. If dropping
        entries can't free enough rows, drop nothing, and return an empty list.
        """
        dropped, num_missing = [], num_rows - len(self._free_rows)
        for block_hash, entry in self._entries.items():
            if num_missing <= 0:
                break
            if not entry.num_reads:
                dropped.append(block_hash)
                num_missing -= len(entry.rows)
        if num_missing > 0:
            return []
        for block_hash in dropped:
            self._free_rows += self._entries.pop(block_hash).rows
        return [self._free_rows.pop() for _ in range(num_rows)]

    def _copy(self, action: str, copies: list[tuple[int, int]]) -> int:
        number, self._num_copies = self._num_copies, self._num_copies + 1
        # first, because a copy that fails may have begun
        self._copies |= dict.fromkeys((block_id for block_id, _ in copies), number)
        self._call(action, number, np.array(copies, np.int32).T.flatten())
        return number

    def _call(self, action: str, number: int, words: np.ndarray) -> None:
        """Call a method of `HostBlocks` on all ranks."""
        call = HostCall(action, number, len(words))
        if self._engine.workers.processes:
            self._engine.workers.send(call, words)
        call.receive(words, self._runner, {})


def use_host_tier(engine: Engine, tier_class: type[T] = HostTier) -> T:
    """Add a tier in host memory to the engine's prefix cache. Return the tier. The model must be loaded.

    Raises ValueError if `swap_space` is too small for a block. Raises RuntimeError if the memory can't be allocated or
    pinned.
    """
    config, runner = engine.config, engine.model_runner
    assert runner is not None
    num_bytes = row_bytes(runner)
    num_rows = int(config.swap_space * 2**30 / config.tensor_parallel_size) // num_bytes
    needed, num_needed = "a cache block takes", config.num_block_tables
    if config.num_states:
        needed = "a cache block with a snapshot takes"
        num_needed += len(rows_of(runner, len(runner._cached_token_ids)))
    if num_rows < num_needed:
        per_rank = f" on each of {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
        size = f"{num_needed * num_bytes / 2**30:.3g} GiB{per_rank}"
        raise ValueError(f"swap_space={config.swap_space:g}: {needed} {size}")
    try:
        tier = tier_class(engine, num_rows)
    except (RuntimeError, OSError) as error:
        cause = engine.workers.cause_of(error)  # another rank may have failed first
        raise RuntimeError(f"swap_space={config.swap_space:g}: the memory could not be allocated: {cause}") from error
    install_connector(engine.scheduler, tier)
    return tier

"""Defines a block manager and a waiting queue for engines whose prefix cache has a second tier."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from itertools import islice
from operator import attrgetter
from time import sleep
from typing import TYPE_CHECKING, Any

from nanovllm.engine.admission import WaitingQueue
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.state_blocks import StateBlockManager
from nanovllm.engine.window_blocks import Column, WindowBlockManager
from nanovllm.tiers.connector import CachedBlock, Connector
from nanovllm.utils.replace import replace_methods

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

logger = logging.getLogger("nanovllm")
Key = tuple[int, list[int]]  # hash and token ids of a CachedBlock
NUM_AHEAD = 128  # this many blocks, the next ones to be evicted, are stored before they are evicted
NUM_SNAPSHOTS_AHEAD = 4  # this many snapshots are stored before their rows are needed
MAX_AHEAD_PER_STEP = 32  # at most this many blocks: more copies would delay the launch of the step
IDLE_SECONDS = 0.0005  # between two checks whether a load has ended, if no sequence can run


def report_loss(totals: Counter[str], problem: str) -> None:
    """Count a failed copy. Log a warning only for the first failed copy, because many may fail."""
    logger.log(logging.DEBUG if totals["lost_copies"] else logging.WARNING, problem)
    totals["lost_copies"] += 1


class Load:
    """Describes contents that are being copied from the store to the device.

    held: the arriving blocks and the cached blocks of the same prefix. No held block can be evicted until the load
        ends.
    contents: the contents that arrive. The list is empty if the prefix cache was cleared or the load failed.
    num_reserved: how many more blocks the sequence needs when it is admitted.
    """

    def __init__(self, held: list[int], contents: list[CachedBlock], num_reserved: int):
        self.held, self.contents, self.num_reserved = held, contents, num_reserved
        self.block_ids = [block_id for content in contents for block_id in content.block_ids]
        self.has_arrived: Callable[[], bool] = lambda: False
        self.has_ended = False


class TieredBlockManager(BlockManager):
    """Copies blocks to a store before they are evicted, and loads stored blocks for waiting sequences.

    The methods of this class replace methods of an engine's block manager. Some block managers store more than the
    blocks of `Sequence.block_table`. Subclasses of TieredBlockManager handle the additional contents.

    **Out.** At the start of each step, the blocks that will soon be evicted are stored. A copy has usually ended long
    before its block is evicted, so the device does not wait. If a step evicts a block whose copy has not ended, the
    step waits for the copy.

    **In.** If the store has blocks of a waiting sequence, the sequence keeps waiting while `fetch` loads them into free
    blocks of the device. During the load, other sequences run, and may overtake the waiting sequence. After the load,
    the loaded blocks are the most recently used cached blocks, and the sequence is admitted with a prefix hit. If the
    sequence does not fit when the load ends, the loaded blocks may be evicted. A sequence loads blocks only once, so no
    sequence waits forever.
    """

    connector: Connector
    totals: Counter[str]  # the scheduler's

    def reset(self) -> None:
        super().reset()
        self.loads: list[Load] = []
        self._arriving: dict[int, Load] = {}  # by hash
        self._loaded: dict[Sequence, int] = {}  # numbers of loaded tokens, until the sequence is admitted
        self._stored: set[int] = set()  # ids of cached blocks and snapshots that were stored
        self._evicted: list[CachedBlock] = []  # since the last call of `_flush`
        self._in_copies: set[int] = set()  # ids of the blocks and states in the next step's `copies`
        self.connector.clear()

    def begin_step(self) -> dict[int, int]:
        for load in [*self.loads]:
            if self._has_ended(load):
                self._end(load)
        ahead = {x.block_hash: x for x in self._next_evicted() if x.block_ids[0] not in self._stored}
        missing = [*ahead.values()][:MAX_AHEAD_PER_STEP]
        self._put(missing)
        self._stored.update(block_id for content in missing for block_id in content.block_ids)
        copies = super().begin_step()
        self._in_copies = {*copies, *copies.values()}
        return copies

    def can_allocate(self, seq: Sequence, num_spare: int = 0) -> bool:
        return super().can_allocate(seq, num_spare + sum(load.num_reserved for load in self.loads))

    def allocate(self, seq: Sequence) -> None:
        super().allocate(seq)
        self._flush()
        num_loaded = min(self._loaded.pop(seq, 0), seq.num_computed_tokens)
        if not any(other.was_admitted for other in seq.group):
            self.totals["loaded_tokens"] += num_loaded

    def fork(self, seq: Sequence, other: Sequence) -> None:
        super().fork(seq, other)
        self._flush()

    def may_append(self, seq: Sequence, num_tokens: int | None = None) -> None:
        super().may_append(seq, num_tokens)
        self._flush()

    def evict(self, block: Block, block_hash: int) -> None:
        self._evicted += self._leaving(block)
        super().evict(block, block_hash)
        self._stored.discard(block.block_id)

    def clear_prefix_cache(self) -> None:
        self.clear_device()
        self.connector.clear()

    def tiers(self) -> dict[str, int]:
        totals = self.totals
        return {
            "device_hits": totals["cached_tokens"] - totals["loaded_tokens"],  # in tokens of prompts
            "host_hits": totals["loaded_tokens"],
            "loaded_blocks": totals["loaded_blocks"],
            "lost_copies": totals["lost_copies"],
            **self.connector.usage(),
        }

    def clear_device(self) -> None:
        """Empty the device's prefix cache, but not the store."""
        super().clear_prefix_cache()
        self._stored.clear()
        self._arriving.clear()
        self._loaded.clear()
        for load in self.loads:
            load.contents = []

    def store_all(self) -> None:
        """Store the contents of the device's prefix cache. The most recently used blocks are stored last."""
        place = {block_id: i for i, block_id in enumerate(self.free_block_ids)}
        found = [(self.hash_to_block_id[max(x.block_hash, ~x.block_hash)], x) for x in self.contents()]
        contents = iter([x for _, x in sorted(found, key=lambda pair: place.get(pair[0], len(place)))])
        while part := [*islice(contents, MAX_AHEAD_PER_STEP)]:
            self._put_at_once(part)

    def contents(self) -> Iterator[CachedBlock]:
        """Yield the contents of the device's prefix cache. The blocks that were cached last come first."""
        for block_hash, block_id in reversed(self.hash_to_block_id.items()):
            token_ids = self.blocks[block_id].token_ids
            for key in (block_hash, ~block_hash):
                block_ids = self._ids_on_device(key, token_ids)
                if block_ids is not None and self.copies.keys().isdisjoint(block_ids):
                    yield CachedBlock(key, token_ids, block_ids)

    def fetch(self, seq: Sequence, num_spare: int) -> Load | None:
        """Return the load that `seq` must wait for, or None.

        If `seq` fits and has stored blocks, begin to load the blocks. `num_spare` blocks must stay free.
        """
        has_token_in_flight = len(seq.token_ids) < seq.num_tokens
        if seq in self._loaded or seq.skips_prefix_hits or has_token_in_flight:
            return None
        prefix = self._longest_prefix(seq)
        on_device = [self._ids_on_device(*key) for key in prefix]
        missing = [key for key, ids in zip(prefix, on_device) if ids is None]
        for block_hash, _ in missing:
            if block_hash in self._arriving:
                return self._arriving[block_hash]
        # a load may run before the next step, so it must not write to blocks that this step's copies use
        in_copies = [i for i in self._in_copies if i in self.free_block_ids]
        if not missing or not self._can_load(seq, num_spare + len(in_copies), prefix):
            return None
        for i in in_copies:
            del self.free_block_ids[i]
        num_blocks = sum(block_hash >= 0 for block_hash, _ in prefix)
        self._loaded = {other: n for other, n in self._loaded.items() if not other.is_finished}  # drop aborted requests
        self._loaded[seq] = (num_blocks - len(self._cached_prefix(seq))) * self.block_size
        num_more = max(0, self.num_blocks_needed(seq) - num_blocks)
        load = self._load([i for ids in on_device for i in ids or ()], missing, self._num_reserved(num_more))
        for i in in_copies:
            self.free_block_ids[i] = None
            self.free_block_ids.move_to_end(i, last=False)
        return None if load.has_ended else load

    def _longest_prefix(self, seq: Sequence) -> list[Key]:
        """Find the longest prefix of `seq` that the device or the store has, and return the keys of its contents."""
        keys = self._known_blocks(seq)
        end = last = len(keys)
        while last > self._first_needed(end):  # look for the second contents of the blocks that end before `end`
            last -= 1
            if not self._is_somewhere(~keys[last][0], keys[last][1]):
                end = last
        return keys[:end] + [(~block_hash, token_ids) for block_hash, token_ids in keys[self._first_needed(end) : end]]

    def _known_blocks(self, seq: Sequence) -> list[Key]:
        """Return the keys of the first blocks of `seq`, up to a block that neither the device nor the store has."""
        keys: list[Key] = []
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            self._extend_hashes(seq, i + 1)
            key = seq.block_hashes[i], self._block_token_ids(seq, i)
            if not self._is_somewhere(*key):
                break
            keys.append(key)
        return keys

    def _is_somewhere(self, block_hash: int, token_ids: list[int]) -> bool:
        is_near = self._ids_on_device(block_hash, token_ids) is not None or block_hash in self._arriving
        return is_near or self.connector.contains(block_hash, token_ids)

    def _load(self, held: list[int], missing: list[Key], num_reserved: int) -> Load:
        held = [i for i in held if i < self.num_blocks]  # not states
        for i in held:
            self.free_block_ids.pop(i, None)
            self.blocks[i].ref_count += 1
        contents = [CachedBlock(*key, self._allocate_for(key[0])) for key in missing]
        load = Load(held, contents, num_reserved)
        load.held += [i for i in load.block_ids if i < self.num_blocks]
        self.loads.append(load)
        self._arriving |= {content.block_hash: load for content in contents}
        self._put(self._evicted)
        self._evicted = []
        try:
            load.has_arrived = self.connector.get(contents)
        except OSError as error:
            self._fail(load, error)
            self._end(load)
        return load

    def _has_ended(self, load: Load) -> bool:
        try:
            return load.has_arrived()
        except OSError as error:
            self._fail(load, error)
            return True

    def _fail(self, load: Load, error: OSError) -> None:
        report_loss(
            self.totals, f"{len(load.block_ids)} cache blocks could not be loaded, and are computed again: {error}"
        )
        for content in load.contents:
            self._arriving.pop(content.block_hash, None)
        load.contents = []

    def _end(self, load: Load) -> None:
        """Add the arrived contents to the prefix cache, and release all blocks of the load."""
        self.connector.order_steps(load.block_ids)
        for content in load.contents:
            del self._arriving[content.block_hash]
            if self._insert(content):
                self._stored.update(content.block_ids)
            self.totals["loaded_blocks"] += len(content.block_ids)
        for block_id in reversed(load.held):
            self._release_block(block_id)
        self.hash_to_block_id = dict(self.hash_to_block_id)  # tells viewers that any block may have changed
        self.loads.remove(load)
        load.has_ended = True

    def _flush(self) -> None:
        """Store the evicted blocks before a step overwrites them."""
        if self._evicted:
            evicted, self._evicted = self._evicted, []
            self._put_at_once(evicted)

    def _put_at_once(self, contents: list[CachedBlock]) -> None:
        """Store contents. Later steps wait for the copies, because steps may overwrite the blocks."""
        self._put(contents)
        self.connector.order_steps([block_id for content in contents for block_id in content.block_ids])

    def _put(self, contents: list[CachedBlock]) -> None:
        if not contents:
            return
        try:
            self.connector.put(contents)
        except OSError as error:
            num_blocks = sum(len(content.block_ids) for content in contents)
            report_loss(self.totals, f"{num_blocks} cache blocks could not be stored: {error}")

    # -- what a subclass adds to ---------------------------------------------------------------------------------------

    def _first_needed(self, num_blocks: int) -> int:
        """Return the index of the first block that needs second contents (hash `~h`).

        The prefix has `num_blocks` blocks.
        """
        return num_blocks

    def _ids_on_device(self, block_hash: int, token_ids: list[int]) -> tuple[int, ...] | None:
        """Return the ids of the device's blocks or state with the given contents, or None if the device lacks them."""
        block_id = self.hash_to_block_id.get(block_hash)
        return None if block_id is None or self.blocks[block_id].token_ids != token_ids else (block_id,)

    def _leaving(self, block: Block) -> list[CachedBlock]:
        """Return the contents that must be stored when `block` is evicted."""
        return [CachedBlock(block.hash, block.token_ids, (block.block_id,))]

    def _next_evicted(self) -> Iterator[CachedBlock]:
        """Yield the contents that will be evicted next. Leave out contents that are known to be stored."""
        for block_id in islice(self.free_block_ids, NUM_AHEAD):
            if block_id not in self._stored and self.blocks[block_id].hash != -1:
                yield from self._leaving(self.blocks[block_id])

    def _can_load(self, seq: Sequence, num_spare: int, prefix: list[Key]) -> bool:
        """Return whether there is room for `seq` and for the additional memory that a load of `prefix` needs."""
        return self.can_allocate(seq, num_spare)

    def _num_reserved(self, num_blocks: int) -> int:
        """Return `Load.num_reserved` for a sequence that needs `num_blocks` blocks more than the loaded blocks."""
        return num_blocks

    def _allocate_for(self, block_hash: int) -> tuple[int, ...]:
        """Allocate blocks or a state for contents with this hash, and return the ids of the blocks or the state."""
        return (self._allocate_block(),)

    def _insert(self, content: CachedBlock) -> bool:
        """Put loaded contents into the prefix cache. Return False if the prefix cache can't use the contents."""
        self.insert(self.blocks[content.block_ids[0]], content.block_hash, content.token_ids)
        return True


class TieredStates(TieredBlockManager, StateBlockManager):
    """Extends TieredBlockManager: also stores and loads snapshots of recurrent states.

    A snapshot is stored when its block is evicted, or when another state needs the snapshot's row.
    """

    def drop_snapshot(self, block_id: int, row: int) -> None:
        snapshot = self._snapshot(block_id, row)
        self._stored.discard(self.num_blocks + row)
        if self.blocks[block_id].hash != -1:  # the prefix cache is not being cleared
            self._put_at_once(snapshot)
        super().drop_snapshot(block_id, row)

    def _snapshot(self, block_id: int, row: int) -> list[CachedBlock]:
        """Return the snapshot of the state after a block, as a list of one element.

        If no launched step has written the snapshot, return an empty list.
        """
        block, state_id = self.blocks[block_id], self.num_blocks + row
        return [] if state_id in self._in_copies else [CachedBlock(~block.hash, block.token_ids, (state_id,))]

    def _first_needed(self, num_blocks: int) -> int:
        return max(0, num_blocks - 1)

    def _ids_on_device(self, block_hash: int, token_ids: list[int]) -> tuple[int, ...] | None:
        if block_hash >= 0:
            return super()._ids_on_device(block_hash, token_ids)
        block_ids = super()._ids_on_device(~block_hash, token_ids) or (-1,)
        return (self.num_blocks + self.snapshots[block_ids[0]],) if block_ids[0] in self.snapshots else None

    def _next_evicted(self) -> Iterator[CachedBlock]:
        num_rows = max(0, NUM_SNAPSHOTS_AHEAD - len(self.rows.free_others) - len(self.rows.free_indices))
        for block_id in islice(self.snapshots, num_rows):
            yield from self._snapshot(block_id, self.snapshots[block_id])
        yield from super()._next_evicted()
        for block_id in islice(self.free_block_ids, NUM_AHEAD):
            if (row := self.snapshots.get(block_id)) is not None:
                yield from self._snapshot(block_id, row)

    def _can_load(self, seq: Sequence, num_spare: int, prefix: list[Key]) -> bool:
        return self._row_for_load() is not None and super()._can_load(seq, num_spare, prefix)

    def _row_for_load(self) -> int | None:
        """Return a row that a load may overwrite at once, if possible one without a snapshot, or else None."""
        rows, in_use = self.rows, {*self.rows.being_read, *(i - self.num_blocks for i in self._in_copies)}
        candidates = (*rows.free_others, *rows.free_indices, *self.snapshots.values())
        return next((row for row in candidates if row not in in_use), None)

    def _allocate_for(self, block_hash: int) -> tuple[int, ...]:
        if block_hash >= 0:
            return super()._allocate_for(block_hash)
        row = self._row_for_load()
        assert row is not None, "_can_load says whether there is one"
        self.rows.forget(next((block_id for block_id, x in self.snapshots.items() if x == row), None))
        (self.rows.free_indices if row < self.rows.num_indices else self.rows.free_others).remove(row)
        return (self.num_blocks + row,)

    def _insert(self, content: CachedBlock) -> bool:
        if content.block_hash >= 0:
            return super()._insert(content)
        block_ids = super()._ids_on_device(~content.block_hash, content.token_ids)
        if not block_ids or block_ids[0] in self.snapshots or block_ids[0] in self._untaken:
            return False
        self.snapshots[block_ids[0]] = content.block_ids[0] - self.num_blocks
        return True

    def _end(self, load: Load) -> None:
        super()._end(load)
        for row in (block_id - self.num_blocks for block_id in load.block_ids if block_id >= self.num_blocks):
            if row not in self.snapshots.values():
                self.rows.append(row)


class TieredWindows(TieredBlockManager, WindowBlockManager):
    """Extends TieredBlockManager: also stores and loads columns of the window tables.

    If a block has the hash `h`, its column has the hash `~h`: see CachedBlock.

    Most columns are freed when the window of a running sequence has passed them. Freed columns are not stored, because
    few prompts could use them. Only a prompt that differs from the sequence within the next few blocks could use a
    freed column. Columns are stored at the end of a prompt, at the end of a sequence, and at the end of a prefix that a
    second prompt shares.
    """

    def reset(self) -> None:
        super().reset()
        self._ends: dict[Sequence, set[int]] = {}  # for running sequences: indices of the columns to store
        self._passed: set[int] = set()  # the first block id of each cached column that is not stored

    def allocate(self, seq: Sequence) -> None:
        ends = len(self._known_blocks(seq)), (len(seq.token_ids) - 1) // self.block_size
        self._ends[seq] = {i for end in ends for i in range(self._first_needed(end), end)}
        super().allocate(seq)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        self._ends[other] = self._ends[seq]
        super().fork(seq, other)

    def deallocate(self, seq: Sequence) -> None:
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        self._free_before(seq, num_full * self.block_size)
        super().deallocate(seq)
        del self._ends[seq]

    def _free_before(self, seq: Sequence, position: int) -> None:
        first, held = self._num_freed[seq], self._held(seq)
        super()._free_before(seq, position)
        for i in {*range(first, self._num_freed[seq])} - self._ends[seq]:
            block = self.blocks[held[i - first][0]]
            if not block.ref_count and block.hash != -1:
                self._passed.add(block.block_id)

    def _share(self, columns: list[Column]) -> None:
        super()._share(columns)
        self._passed.difference_update(column[0] for column in columns)

    def clear_device(self) -> None:
        super().clear_device()
        self._passed.clear()

    def contents(self) -> Iterator[CachedBlock]:
        return (content for content in super().contents() if content.block_ids[0] not in self._passed)

    def evict(self, block: Block, block_hash: int) -> None:
        column = self.columns.get(block_hash, ())
        super().evict(block, block_hash)
        if block.block_id in column:
            self._passed.discard(column[0])
            self._stored.difference_update(column)

    def reserve_chunk(self, seq: Sequence, end: int) -> int:
        end = super().reserve_chunk(seq, end)
        self._flush()
        return end

    def _first_needed(self, num_blocks: int) -> int:
        return self.first_column(num_blocks * self.block_size)

    def _ids_on_device(self, block_hash: int, token_ids: list[int]) -> tuple[int, ...] | None:
        if block_hash >= 0:
            return super()._ids_on_device(block_hash, token_ids)
        column = self.columns.get(~block_hash)
        return None if column is None or self.blocks[column[0]].token_ids != token_ids else column

    def _leaving(self, block: Block) -> list[CachedBlock]:
        column = self.columns.get(block.hash, ())
        if block.block_id not in column:
            return super()._leaving(block)
        return [CachedBlock(~block.hash, block.token_ids, column)] if column[0] not in self._passed else []

    def _can_load(self, seq: Sequence, num_spare: int, prefix: list[Key]) -> bool:
        num_columns = sum(block_hash < 0 for block_hash, _ in prefix)
        return super()._can_load(seq, num_spare + num_columns, prefix)

    def _num_reserved(self, num_blocks: int) -> int:
        num_columns = min(num_blocks, self.num_blocks_for(self.window) + 1)
        return -(-(num_blocks + self.num_tables * num_columns) // (1 + self.num_tables))

    def _allocate_for(self, block_hash: int) -> tuple[int, ...]:
        return super()._allocate_for(block_hash) if block_hash >= 0 else self._allocate_column()

    def _insert(self, content: CachedBlock) -> bool:
        if content.block_hash >= 0:
            return super()._insert(content)
        if self.columns.setdefault(~content.block_hash, content.block_ids) is not content.block_ids:
            return False
        for block_id in content.block_ids:
            self.blocks[block_id].update(~content.block_hash, content.token_ids)
        return True


class TieredQueue(WaitingQueue):
    """A waiting queue whose method `next_ready` begins loads, and skips sequences whose blocks are being loaded."""

    def __init__(self, scheduler: "Scheduler", make_queue: Callable[[], WaitingQueue]):
        """`make_queue` makes a queue for the sequences that do not wait for a load."""
        self._scheduler, self._others = scheduler, make_queue()
        self._loading: dict[Sequence, Load] = {}

    def __len__(self) -> int:
        return len(self._others) + len(self._loading)

    def __iter__(self) -> Iterator[Sequence]:
        order = attrgetter("order")
        return merge(self._others, sorted(self._loading, key=order), key=order)

    def __repr__(self) -> str:
        return repr([*self])

    def __getitem__(self, index: int) -> Sequence:
        return [*self][index]

    def push(self, seq: Sequence) -> None:
        self._others.push(seq)

    def discard(self, seq: Sequence) -> None:
        if self._loading.pop(seq, None) is None:
            self._others.discard(seq)

    def next_ready(self) -> Sequence | None:
        for arrived in [seq for seq, load in self._loading.items() if load.has_ended]:
            del self._loading[arrived]
            self._others.push(arrived)
        scheduler, blocks = self._scheduler, self._scheduler.block_manager
        assert isinstance(blocks, TieredBlockManager)
        while (seq := self._others.next_ready()) is not None:
            num_others = scheduler.num_others(seq)
            if num_others >= scheduler.max_num_seqs or scheduler.admission.is_on(scheduler.num_running):
                return seq  # the scheduler does not admit `seq` in this step
            if (load := blocks.fetch(seq, num_spare=num_others)) is None:
                if not self._loading or blocks.can_allocate(seq, num_spare=num_others):
                    return seq
                break  # loads may hold the blocks that `seq` needs; returning `seq` would pause all admissions
            self._others.discard(seq)
            self._loading[seq] = load
        if self._loading and not scheduler.num_running:
            sleep(IDLE_SECONDS)
        return None


def use_connector(llm: Any, connector: Connector) -> None:
    """Add a second tier to the prefix cache of an LLM without requests, and empty the prefix cache.

    Raises TypeError if `connector` is not a Connector. Raises ValueError if prefix caching is off, if the prefix cache
    already has a second tier, or if a request has not ended.
    """
    scheduler = llm.scheduler
    check_connector(scheduler, connector)  # an error in the engine's thread would fail all requests

    def install_if_idle() -> int:
        if not scheduler.live:
            install_connector(scheduler, connector)
        return len(scheduler.live)

    if num_requests := llm.engine_thread.call(install_if_idle):
        raise ValueError(f"{num_requests} requests have not ended: install a connector before the first request")


def check_connector(scheduler: "Scheduler", connector: Connector) -> None:
    """Raise the errors of `use_connector`, except for requests that have not ended."""
    if not isinstance(connector, Connector):
        raise TypeError(f"connector={connector!r:.80}: must be an object of a subclass of Connector")
    blocks = scheduler.block_manager
    if not blocks.enable_prefix_caching:
        raise ValueError("enable_prefix_caching=False: must be True, because a connector stores the prefix cache")
    if isinstance(blocks, TieredBlockManager):
        raise ValueError(f"the prefix cache already has a connector, a {type(blocks.connector).__name__}")


def install_connector(scheduler: "Scheduler", connector: Connector) -> None:
    """Do the work of `use_connector` for an idle scheduler, in the engine's thread."""
    check_connector(scheduler, connector)
    blocks: Any = scheduler.block_manager
    forms = {StateBlockManager: TieredStates, WindowBlockManager: TieredWindows, BlockManager: TieredBlockManager}
    blocks.connector, blocks.totals = connector, scheduler.totals
    replace_methods(blocks, next(form for kind, form in forms.items() if isinstance(blocks, kind)), "Tiered")
    scheduler.make_queue = partial(TieredQueue, scheduler, scheduler.make_queue)  # type: ignore[method-assign]
    scheduler.reset()

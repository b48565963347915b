"""Defines the block manager and the waiting queue of an engine whose prefix cache has a second tier."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from itertools import islice
from operator import attrgetter
from time import sleep
from typing import TYPE_CHECKING

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.scheduling_policy import WaitingQueue
from nanovllm.engine.sequence import Sequence
from nanovllm.tiers.connector import CachedBlock, Connector

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

logger = logging.getLogger("nanovllm")
NUM_AHEAD = 128  # this many blocks, the next ones to be evicted, are stored before they are evicted
MAX_AHEAD_PER_STEP = 32  # at most this many blocks: more copies would delay the launch of the step
IDLE_SECONDS = 0.0005  # between two checks whether a load has ended, if no sequence can run


class Load:
    """Blocks that are being copied from the store to the device.

    held: the blocks that are in use until the load ends: the arriving blocks, and the cached blocks before them.
    contents: the arriving blocks, or an empty list if the prefix cache was cleared or the load failed.
    num_reserved: the number of additional blocks that the sequence needs when it is admitted.
    """

    def __init__(self, held: list[Block], contents: list[CachedBlock], num_reserved: int):
        self.held, self.contents, self.num_reserved = held, contents, num_reserved
        self.block_ids = [content.block_id for content in contents]
        self.has_arrived: Callable[[], bool] = lambda: False
        self.has_ended = False


class TieredBlockManager(BlockManager):
    """Copies blocks to a store before they are evicted, and loads them when a waiting sequence begins with them.

    **Out.** At the start of each step, the blocks that will be evicted next are stored. The copy of an evicted block
    has therefore usually ended long before, and the device does not wait. If a step evicts a block whose copy has not
    ended, the step waits for the copy.

    **In.** If the store has blocks of a waiting sequence, the sequence keeps waiting while `fetch` loads these blocks
    into free blocks. Meanwhile, other sequences run, and may overtake the sequence. When the load has ended, the loaded
    blocks are the most recently used cached blocks, and the sequence is admitted with a prefix hit. If the sequence
    does not fit at that time, the loaded blocks may be evicted, and the sequence does not load blocks a second time. So
    no sequence waits forever.
    """

    def __init__(self, scheduler: "Scheduler", connector: Connector):
        plain, self.connector, self.totals = scheduler.block_manager, connector, scheduler.totals
        super().__init__(plain.num_blocks, plain.block_size)

    def reset(self) -> None:
        super().reset()
        self.loads: list[Load] = []
        self._arriving: dict[int, Load] = {}  # by block hash
        self._loaded: dict[Sequence, int] = {}  # numbers of loaded tokens, until the sequence is admitted
        self._stored: set[int] = set()  # ids of cached blocks that were stored
        self._evicted: list[CachedBlock] = []  # since the last call of `_flush`
        self._in_copies: set[int] = set()  # ids of the blocks in the next step's `copies`
        self.connector.clear()

    def take_copies(self) -> dict[int, int]:
        for load in [*self.loads]:
            if self._has_ended(load):
                self._end(load)
        ahead = [self.blocks[i] for i in islice(self.free_block_ids, NUM_AHEAD)]
        missing = [block for block in ahead if block.hash != -1 and block.block_id not in self._stored]
        self._put([CachedBlock(x.hash, x.token_ids, x.block_id) for x in missing[:MAX_AHEAD_PER_STEP]])
        copies = super().take_copies()
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
        super().evict(block, block_hash)
        self._stored.discard(block.block_id)
        self._evicted.append(CachedBlock(block_hash, block.token_ids, block.block_id))

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self.connector.clear()
        self._stored.clear()
        self._arriving.clear()
        for load in self.loads:
            load.contents = []

    def fetch(self, seq: Sequence, num_spare: int) -> Load | None:
        """Return a load that `seq` must wait for, or None. If `seq` fits and has stored blocks, begin to load them.

        `num_spare` blocks must stay free.
        """
        has_token_in_flight = len(seq.token_ids) < seq.num_tokens
        if seq in self._loaded or seq.skips_prefix_hits or has_token_in_flight:
            return None
        held: list[Block] = []
        missing: list[tuple[int, list[int]]] = []
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            self._extend_hashes(seq, i + 1)
            key = block_hash, token_ids = seq.block_hashes[i], self._block_token_ids(seq, i)
            block_id = self.hash_to_block_id.get(block_hash)
            if block_id is not None and self.blocks[block_id].token_ids == token_ids:
                held.append(self.blocks[block_id])
            elif block_hash in self._arriving:
                if not missing:
                    return self._arriving[block_hash]
                break
            elif self.connector.contains(*key):
                missing.append(key)
            else:
                break
        # a load may run before the next step, so it must not write to blocks that this step's copies use
        in_copies = [i for i in self._in_copies if i in self.free_block_ids]
        if not missing or not self.can_allocate(seq, num_spare + len(in_copies)):
            return None
        for i in in_copies:
            del self.free_block_ids[i]
        load = self._load(seq, held, missing)
        for i in in_copies:
            self.free_block_ids[i] = None
            self.free_block_ids.move_to_end(i, last=False)
        return None if load.has_ended else load

    def _load(self, seq: Sequence, held: list[Block], missing: list[tuple[int, list[int]]]) -> Load:
        for block in held:
            self.free_block_ids.pop(block.block_id, None)
            block.ref_count += 1
        contents = [CachedBlock(*key, self._allocate_block()) for key in missing]
        held = held + [self.blocks[content.block_id] for content in contents]
        load = Load(held, contents, max(0, self.num_blocks_for(seq.num_tokens + 1) - len(held)))
        self.loads.append(load)
        self._loaded = {other: n for other, n in self._loaded.items() if not other.is_finished}  # drop aborted requests
        self._loaded[seq] = len(contents) * self.block_size
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
        self._warn(f"{len(load.contents)} cache blocks could not be loaded, and are computed again: {error}")
        for content in load.contents:
            self._arriving.pop(content.block_hash, None)
        load.contents = []

    def _end(self, load: Load) -> None:
        """Put the arrived blocks into the prefix cache, and free all blocks of the load."""
        self.connector.order_steps(load.block_ids)
        for block_hash, token_ids, block_id in load.contents:
            del self._arriving[block_hash]
            self.insert(self.blocks[block_id], block_hash, token_ids)
            self._stored.add(block_id)
        self.totals["loaded_blocks"] += len(load.contents)
        for block in reversed(load.held):
            self._release_block(block.block_id)
        self.hash_to_block_id = dict(self.hash_to_block_id)  # tells viewers that any block may have changed
        self.loads.remove(load)
        load.has_ended = True

    def _flush(self) -> None:
        """Store the evicted blocks, before a step overwrites them."""
        if self._evicted:
            evicted, self._evicted = self._evicted, []
            self._put(evicted)
            self.connector.order_steps([block.block_id for block in evicted])

    def _put(self, blocks: list[CachedBlock]) -> None:
        if not blocks:
            return
        try:
            self.connector.put(blocks)
        except OSError as error:
            self._warn(f"{len(blocks)} cache blocks could not be stored: {error}")
        self._stored |= {x.block_id for x in blocks if self.blocks[x.block_id].hash == x.block_hash}

    def _warn(self, problem: str) -> None:
        """Log a warning for the first problem only, because a failing store may fail often."""
        logger.log(logging.DEBUG if self.totals["lost_copies"] else logging.WARNING, problem)
        self.totals["lost_copies"] += 1


class TieredQueue(WaitingQueue):
    """A waiting queue whose `first` begins loads, and skips sequences whose blocks are being loaded."""

    def __init__(self, scheduler: "Scheduler", make_queue: Callable[[], WaitingQueue]):
        """`make_queue` makes the queue for sequences that wait for no load."""
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

    def first(self) -> Sequence | None:
        for arrived in [seq for seq, load in self._loading.items() if load.has_ended]:
            del self._loading[arrived]
            self._others.push(arrived)
        scheduler, blocks = self._scheduler, self._scheduler.block_manager
        assert isinstance(blocks, TieredBlockManager)
        num_running = len(scheduler.running) + len(scheduler.prefilling)
        while (seq := self._others.first()) is not None:
            num_others = scheduler.num_others(seq)
            if num_others >= scheduler.max_num_seqs or scheduler.admission.is_on(num_running):
                return seq  # the scheduler does not admit it in this step
            if (load := blocks.fetch(seq, num_spare=num_others)) is None:
                if not self._loading or blocks.can_allocate(seq, num_spare=num_others):
                    return seq
                break  # loads may hold the blocks that it lacks, and to return it would pause all admissions
            self._others.discard(seq)
            self._loading[seq] = load
        if self._loading and not num_running:
            sleep(IDLE_SECONDS)
        return None


def check_manager(blocks: BlockManager) -> None:
    """Raise ValueError if the prefix cache is off, or if the model has states or several block tables."""
    if type(blocks) is not BlockManager or not blocks.enable_prefix_caching:
        reason = "layers with a state or with block tables of their own" if blocks.enable_prefix_caching else ""
        raise ValueError(f"swap_space: is not supported with {reason or 'enable_prefix_caching=False'}")


def use_connector(scheduler: "Scheduler", connector: Connector) -> None:
    """Give the prefix cache of an idle scheduler a second tier, and empty the prefix cache.

    Raises the errors of `check_manager`.
    """
    check_manager(scheduler.block_manager)
    scheduler.block_manager = TieredBlockManager(scheduler, connector)
    scheduler.make_queue = partial(TieredQueue, scheduler, scheduler.make_queue)  # type: ignore[method-assign]
    scheduler.totals["tiers"] = 2
    scheduler.reset()

"""The block manager for models in which only some layers attend to a window.

Layers with a window have separate block tables, and blocks before the window are freed. The code in
cache/window_tables.py divides the layers among the tables.
"""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.scheduled_step import ScheduledSequence
from nanovllm.engine.sequence import Sequence

Column = tuple[int, ...]  # one block id for each window table; all of them store the same tokens


class WindowBlockManager(BlockManager):
    """Manages one pool of blocks for all tables. A block stores the keys and values of one table's layers.

    `Sequence.block_table` is the table of the layers without a window, and `Sequence.window_columns` contains the
    columns of the window tables. Column `i` stores the same tokens in all tables. The block ids in a freed column are
    0.

    While a prompt is computed, each chunk allocates its columns. If too few blocks are free, the chunk is shortened.
    Columns before the window are freed before the next chunk. A decoding sequence frees old columns when it needs a new
    column. A step in flight may still read a freed block. Freeing a block during the step is safe: the device runs
    steps in order, and only a later step writes to the block.

    A prefix is found if the prefix cache contains the prefix's blocks of the first table, and all columns in the window
    of the next token.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_tables: int, window: int):
        """The pool has `num_blocks` blocks for each table. `num_tables` is the number of window tables."""
        self.num_tables, self.window = num_tables, window
        super().__init__(num_blocks * (1 + num_tables), block_size, enable_prefix_caching)

    def reset(self) -> None:
        super().reset()
        self.columns: dict[int, Column] = {}  # the prefix cache of the window tables, by hash
        self._num_freed: dict[Sequence, int] = {}  # for each sequence, how many of its first columns it does not hold
        self._chunked: list[Sequence] = []  # the sequences with a chunk in the last scheduled step, and their forks

    def first_column(self, position: int) -> int:
        """Return the first column in the window of the token at `position`."""
        return max(0, position + 1 - self.window) // self.block_size

    @property
    def num_free(self) -> int:
        return len(self.free_block_ids) // (1 + self.num_tables)

    @property
    def num_cached(self) -> int:
        unused = sum(self.blocks[column[0]].ref_count == 0 for column in [*self.columns.values()])
        return super().num_cached + unused * self.num_tables

    def groups(self) -> list[dict]:
        num_used = len(self.blocks) - len(self.free_block_ids)
        freed = [*self._num_freed.items()]  # a copy, because the engine's thread may run a step meanwhile
        held = {block_id for seq, n in freed for column in seq.window_columns[n:] for block_id in column}
        return [
            {"window": None, "used": num_used - len(held)},
            {"window": self.window, "tables": self.num_tables, "used": len(held)},
        ]

    def can_allocate(self, seq: Sequence, num_spare: int = 0) -> bool:
        """Return whether `seq` fits. Window tables need space for only a small chunk of the prompt at a time."""
        cached_ids = self._cached_prefix(seq)
        num_hit, num_blocks = len(cached_ids), self.num_blocks_needed(seq)
        hit = self._hit_columns(seq, num_hit)
        num_shared = sum(self.blocks[block_id].ref_count > 0 for block_id in cached_ids)
        num_unused = sum(self.blocks[column[0]].ref_count == 0 for column in hit)
        num_columns = num_unused + min(num_blocks - num_hit, self.num_blocks_for(self.window) + 1)
        needed = num_blocks - num_shared + self.num_tables * num_columns + (1 + self.num_tables) * num_spare
        return needed <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        num_hit = len(self._cached_prefix(seq))
        hit = self._hit_columns(seq, num_hit)
        self._num_freed[seq] = num_hit - len(hit)
        seq.window_columns = [(0,) * self.num_tables] * self._num_freed[seq] + hit
        self._share(hit)  # before `super` allocates blocks, which may evict cached ones
        super().allocate(seq)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        super().fork(seq, other)
        num_full = seq.num_computed_tokens // self.block_size
        other.window_columns = seq.window_columns[:num_full]
        self._num_freed[other] = min(self._num_freed[seq], num_full)
        self._share(self._held(other))
        other.window_columns.append(self._allocate_column())
        if len(seq.window_columns) > num_full:
            self.copies.update(zip(other.window_columns[-1], seq.window_columns[num_full]))
        self._chunked.append(other)  # the last chunk of `seq` may have computed columns that `other` does not need

    def prepare_decodes(self, rows: list[ScheduledSequence]) -> list[int]:
        """Return the indices of the rows that need another block, and free the columns before these rows' windows."""
        growing = super().prepare_decodes(rows)
        for i in growing:
            seq = rows[i].seq
            self._free_before(seq, len(seq.token_ids) - 1)
        return growing

    def may_append(self, seq: Sequence, num_tokens: int | None = None) -> None:
        super().may_append(seq, num_tokens)
        while len(seq.window_columns) < len(seq.block_table):
            seq.window_columns.append(self._allocate_column())

    def reserve_chunk(self, seq: Sequence, end: int) -> int:
        """Allocate the columns of a chunk. If too few blocks are free, the chunk ends earlier, or is empty."""
        self._free_before(seq, seq.num_computed_tokens)
        num_columns = len(seq.window_columns) + len(self.free_block_ids) // self.num_tables
        end = min(end, num_columns * self.block_size)
        while len(seq.window_columns) < self.num_blocks_for(end):
            seq.window_columns.append(self._allocate_column())
        self._chunked.append(seq)
        return end

    def begin_step(self) -> dict[int, int]:
        for seq in self._chunked:
            if seq in self._num_freed:
                self._free_before(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
        self._chunked.clear()
        return super().begin_step()

    def hash_blocks(self, seq: Sequence, num_tokens: int | None = None) -> None:
        super().hash_blocks(seq, num_tokens)
        if not self.enable_prefix_caching:
            return
        num_known = len(seq.token_ids)
        num_full = (num_known if num_tokens is None else min(num_tokens, num_known)) // self.block_size
        for i in range(num_full - 1, self._num_freed.get(seq, num_full) - 1, -1):
            block_hash, column = seq.block_hashes[i], seq.window_columns[i]
            if self.blocks[column[0]].hash != -1:
                break
            if self.columns.setdefault(block_hash, column) is column:
                for block_id in column:
                    self.blocks[block_id].update(block_hash, self._block_token_ids(seq, i))

    def deallocate(self, seq: Sequence) -> None:
        super().deallocate(seq)
        for column in reversed(self._held(seq)):
            self._release_column(column)
        seq.window_columns = []
        del self._num_freed[seq]

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self.columns.clear()

    def evict(self, block: Block, block_hash: int) -> None:
        """Remove the block from the prefix cache. If the block belongs to a column, remove the whole column."""
        if block.block_id not in self.columns.get(block_hash, ()):
            super().evict(block, block_hash)
            return
        for block_id in self.columns.pop(block_hash):
            self.blocks[block_id].hash = -1
            if block_id in self.free_block_ids:
                self.free_block_ids.move_to_end(block_id, last=False)

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        block_ids = super()._cached_prefix(seq)
        end = last = len(block_ids)
        while last > self.first_column(end * self.block_size):  # look for the columns that end before `end`
            last -= 1
            column = self.columns.get(seq.block_hashes[last])
            if column is None or self.blocks[column[0]].token_ids != self._block_token_ids(seq, last):
                end = last
        return block_ids[:end]

    def _hit_columns(self, seq: Sequence, num_hit: int) -> list[Column]:
        """Return the cached columns in the window of the token after the first `num_hit` blocks."""
        first = self.first_column(num_hit * self.block_size)
        return [self.columns[block_hash] for block_hash in seq.block_hashes[first:num_hit]]

    def _held(self, seq: Sequence) -> list[Column]:
        return seq.window_columns[self._num_freed[seq] :]

    def _share(self, columns: list[Column]) -> None:
        for column in columns:
            for block_id in column:
                self.free_block_ids.pop(block_id, None)
                self.blocks[block_id].ref_count += 1

    def _free_before(self, seq: Sequence, position: int) -> None:
        end = min(self.first_column(position), len(seq.window_columns))
        for i in range(self._num_freed[seq], end):
            self._release_column(seq.window_columns[i])
            seq.window_columns[i] = (0,) * self.num_tables
        self._num_freed[seq] = max(self._num_freed[seq], end)

    def _allocate_column(self) -> Column:
        return tuple(self._allocate_block() for _ in range(self.num_tables))

    def _release_column(self, column: Column) -> None:
        for block_id in column:
            self._release_block(block_id)

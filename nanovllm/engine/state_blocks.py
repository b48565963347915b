"""The block manager for models with states. If layers keep states, a prefix hit needs a snapshot of the state."""

from collections import OrderedDict
from collections.abc import Callable

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class StateRows:
    """Tracks the rows of states that no running sequence uses. The Scheduler's `free_req_indices` is a StateRows.

    A running sequence's state is in the row of its request index, which is below `num_indices`. The rows of request
    indices are followed by a row for padding, a row of zeros (every sequence's initial state), and rows for snapshots.
    The row of an unused request index may store a snapshot. If the rows of all unused request indices store snapshots,
    a sequence that needs an index gets the row of the least recently used snapshot. This snapshot is dropped.
    """

    def __init__(self, num_indices: int, num_states: int, drop_snapshot: Callable[[int, int], None]):
        """`drop_snapshot(block_id, row)` frees the row of a dropped snapshot."""
        self._drop_snapshot = drop_snapshot
        self.num_indices, self.zeros = num_indices, num_indices + 1
        self.free_indices = [*reversed(range(num_indices))]
        self.free_others = [*reversed(range(self.zeros + 1, num_states + 2))]  # for snapshots
        self.snapshots: OrderedDict[int, int] = OrderedDict()  # block id -> row, the least recently found first
        self.being_read: set[int] = set()  # rows that the scheduled step reads; no sequence may write there

    def __bool__(self) -> bool:
        return bool(self.free_indices) or self._least_recent_index() is not None

    def pop(self) -> int:
        """Return a free request index. If necessary, drop a snapshot first."""
        if not self.free_indices:
            self.forget(self._least_recent_index())
        return self.free_indices.pop()

    def append(self, row: int) -> None:
        (self.free_indices if row < self.num_indices else self.free_others).append(row)

    def pop_for_snapshot(self) -> int | None:
        """Return a free row, or None. If no row is free, first drop the least recently found snapshot."""
        if not (self.free_others or self.free_indices) and self.snapshots:
            self.forget(next(iter(self.snapshots)))
        free = self.free_others or self.free_indices
        return free.pop() if free else None

    def forget(self, block_id: int | None) -> None:
        """Drop the snapshot at the end of a block, if there is one, and free its row."""
        if block_id is not None and (row := self.snapshots.pop(block_id, None)) is not None:
            self._drop_snapshot(block_id, row)

    def _least_recent_index(self) -> int | None:
        """Return the block id of the least recently found snapshot whose row belongs to a request index, or None."""
        rows = self.snapshots.items()
        return next((i for i, row in rows if row < self.num_indices and row not in self.being_read), None)


class StateBlockManager(BlockManager):
    """Lets sequences share cached blocks up to the position of a snapshot. Tracks which rows of states are read and
    copied.

    In `copies`, row `r` of the states has id `num_blocks + r`.

    The state at the end of a prompt's last full block is stored as a snapshot. A snapshot is also stored at the end of
    the prompt's cached blocks, if none exists there, because prompts share these blocks. A chunk ends at each snapshot,
    so a snapshot costs a copy of the state and an additional step. The next step copies the state, and its prompts can
    already find the snapshot. If no row is free, the least recently found snapshot is dropped. If a block is evicted,
    the snapshot at its end is dropped as well.

    If the cached blocks end with an answer, the prompt continues a conversation. The conversation's next prompt will
    begin with the whole current prompt, so no snapshot is stored at the end of the cached answer. If snapshots must be
    dropped, the snapshot that the current prompt found is dropped first.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, max_num_seqs: int, num_states: int
    ):
        self.max_num_seqs, self.num_states = max_num_seqs, num_states
        super().__init__(num_blocks, block_size, enable_prefix_caching)

    def reset(self) -> None:
        super().reset()
        self.rows = StateRows(self.max_num_seqs, self.num_states, self.drop_snapshot)
        self.snapshots = self.rows.snapshots
        self._untaken: dict[int, int] = {}  # block id -> row of a snapshot that the next step will take
        self._unused: list[int] = []  # rows of untaken snapshots whose blocks were evicted
        self._first_rows: dict[Sequence, int] = {}  # the row that a sequence's first chunk reads
        self._boundaries: dict[Sequence, list[int]] = {}  # positions of future snapshots, descending
        self._decoded: set[int] = set()  # ids of cached blocks whose last token was generated

    def req_indices(self, max_num_seqs: int) -> StateRows:
        return self.rows

    def can_allocate(self, seq: Sequence, num_spare: int = 0) -> bool:
        return bool(self.rows) and super().can_allocate(seq, num_spare)

    def allocate(self, seq: Sequence) -> None:
        cached_ids = super()._cached_prefix(seq)
        is_conversation = bool(cached_ids) and cached_ids[-1] in self._decoded
        super().allocate(seq)
        num_hit, row = seq.num_computed_tokens, self.rows.zeros
        if num_hit:
            block_id = seq.block_table[num_hit // self.block_size - 1]
            self.snapshots.move_to_end(block_id, last=not is_conversation)
            row = self.snapshots[block_id]
        self._first_rows[seq] = row
        if self.enable_prefix_caching:
            last = (len(seq.token_ids) - 1) // self.block_size * self.block_size
            first = last if is_conversation else len(cached_ids) * self.block_size
            self._boundaries[seq] = sorted({n for n in (first, last) if n > num_hit}, reverse=True)

    def drop_snapshot(self, block_id: int, row: int) -> None:
        """Free the row of a block's snapshot, which the caller has removed from `snapshots`."""
        self.rows.append(row)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        super().fork(seq, other)
        self.copies[self.num_blocks + other.req_index] = self.num_blocks + seq.req_index

    def reserve_chunk(self, seq: Sequence, end: int) -> int:
        return min([end, *self._boundaries.get(seq, ())[-1:]])

    def state_row(self, seq: Sequence) -> int:
        row = self._first_rows.pop(seq, seq.req_index)
        self.rows.being_read.add(row)
        return row

    def hash_blocks(self, seq: Sequence, num_tokens: int | None = None) -> None:
        super().hash_blocks(seq, num_tokens)
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if self.enable_prefix_caching and num_full * self.block_size > seq.num_prompt_tokens:
            self._decoded.add(seq.block_table[num_full - 1])
        boundaries = self._boundaries.get(seq)
        if boundaries and seq.num_computed_tokens == boundaries[-1]:
            self._take_snapshot(seq, boundaries.pop() // self.block_size - 1)

    def begin_step(self) -> dict[int, int]:
        self.snapshots |= self._untaken
        for row in self._unused:
            self.rows.append(row)
        self._untaken, self._unused, self.rows.being_read = {}, [], set()
        return super().begin_step()

    def deallocate(self, seq: Sequence) -> None:
        super().deallocate(seq)
        self._boundaries.pop(seq, None)
        self._first_rows.pop(seq, None)

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self._decoded.clear()
        for block_id in [*self.snapshots, *self._untaken]:
            self._forget_snapshot(block_id)

    def evict(self, block: Block, block_hash: int) -> None:
        super().evict(block, block_hash)
        self._decoded.discard(block.block_id)
        self._forget_snapshot(block.block_id)

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        block_ids = super()._cached_prefix(seq)
        while block_ids and block_ids[-1] not in self.snapshots:
            block_ids.pop()
        return block_ids

    def _take_snapshot(self, seq: Sequence, i: int) -> None:
        """Request a snapshot of the state after block `i` of `seq`."""
        block_id = self.hash_to_block_id[seq.block_hashes[i]]  # of the duplicates, the block that lookups find
        is_collision = self.blocks[block_id].token_ids != self._block_token_ids(seq, i)
        if is_collision or block_id in self.snapshots or block_id in self._untaken:
            return
        if (row := self.rows.pop_for_snapshot()) is not None:
            self._untaken[block_id] = row
            self.copies[self.num_blocks + row] = self.num_blocks + seq.req_index

    def _forget_snapshot(self, block_id: int) -> None:
        self.rows.forget(block_id)
        if (row := self._untaken.pop(block_id, None)) is not None:
            self._unused.append(row)  # not free yet, because the next step copies into it

"""The block manager of models with layers that keep a state: prefix hits need a snapshot of it."""

from collections import OrderedDict

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class StateBlockManager(BlockManager):
    """Shares blocks only up to where a snapshot of the state is, and says which rows of the states are read and copied.

    The state of a running sequence is in the row of its request index. Then come the rows of padding, of zeros, with
    which every sequence begins, and of snapshots. In `copies`, the id of a row is `num_blocks` more than the row.

    A prompt leaves a snapshot at the end of its last full block, and where blocks of a prefix were found but no
    snapshot: there a prefix is used for the second time. Chunks end at these boundaries. So a snapshot costs a copy of
    the state, and a step more for its prompt. It is taken, and can be found, from the step after that chunk on. When
    there are too many, the one that was found least recently goes, and each goes with its block.

    Where the blocks that were found end with an answer, a conversation goes on. Its next prompt will begin with all of
    this one: so there is no snapshot at the end of the answer, and the one that was found is the next to go.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, max_num_seqs: int, num_rows: int):
        self.zeros = max_num_seqs + 1
        self.num_rows = num_rows  # see layers/state.py
        super().__init__(num_blocks, block_size, enable_prefix_caching)

    def reset(self) -> None:
        super().reset()
        self.snapshots: OrderedDict[int, int] = OrderedDict()  # block id -> row, the least recently found first
        self.free_rows = [*reversed(range(self.zeros + 1, self.num_rows))]
        self._untaken: dict[int, int] = {}  # of the next step: they can't be found yet
        self._first_rows: dict[Sequence, int] = {}  # what the first chunk of a sequence reads
        self._boundaries: dict[Sequence, list[int]] = {}  # numbers of tokens, the first one last
        self._decoded: set[int] = set()  # ids of cached blocks that answers have filled

    def allocate(self, seq: Sequence) -> None:
        found = super()._cached_prefix(seq)
        is_conversation = bool(found) and found[-1] in self._decoded
        super().allocate(seq)
        num_hit, row = seq.num_computed_tokens, self.zeros
        if num_hit:
            block_id = seq.block_table[num_hit // self.block_size - 1]
            self.snapshots.move_to_end(block_id, last=not is_conversation)
            row = self.snapshots[block_id]
        self._first_rows[seq] = row
        if self.enable_prefix_caching:
            last = (len(seq.token_ids) - 1) // self.block_size * self.block_size
            first = last if is_conversation else len(found) * self.block_size
            self._boundaries[seq] = sorted({n for n in (first, last) if n > num_hit}, reverse=True)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        super().fork(seq, other)
        self.copies[self.num_blocks + other.req_index] = self.num_blocks + seq.req_index

    def chunk_end(self, seq: Sequence, end: int) -> int:
        return min([end, *self._boundaries.get(seq, ())[-1:]])

    def state_row(self, seq: Sequence) -> int:
        return self._first_rows.pop(seq, seq.req_index)

    def cache_full_blocks(self, seq: Sequence) -> None:
        super().cache_full_blocks(seq)
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if self.enable_prefix_caching and num_full * self.block_size > seq.num_prompt_tokens:
            self._decoded.add(seq.block_table[num_full - 1])
        boundaries = self._boundaries.get(seq)
        if boundaries and seq.num_computed_tokens == boundaries[-1]:
            self._take_snapshot(seq, boundaries.pop() // self.block_size - 1)

    def take_copies(self) -> dict[int, int]:
        self.snapshots |= self._untaken
        self._untaken = {}
        return super().take_copies()

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
        """Take a snapshot of the state after the i-th block of `seq`, which the step that is scheduled computes."""
        block_id = self.hash_to_block_id[seq.block_hashes[i]]  # the one of these contents that is found
        is_other = self.blocks[block_id].token_ids != self._block_token_ids(seq, i)  # of the same hash
        if is_other or block_id in self.snapshots or block_id in self._untaken:
            return
        if not self.free_rows and self.snapshots:
            self._forget_snapshot(next(iter(self.snapshots)))
        if self.free_rows:
            row = self._untaken[block_id] = self.free_rows.pop()
            self.copies[self.num_blocks + row] = self.num_blocks + seq.req_index

    def _forget_snapshot(self, block_id: int) -> None:
        row = self.snapshots.pop(block_id, None)
        if row is None:
            row = self._untaken.pop(block_id, None)
        if row is not None:
            self.free_rows.append(row)

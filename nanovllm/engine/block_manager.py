"""Assigns cache blocks to sequences, with reference counts and a prefix cache of full blocks."""

import secrets
from collections import OrderedDict

import xxhash

from nanovllm.engine.scheduled_step import ScheduledSequence
from nanovllm.engine.sequence import Sequence, packed_ids


class Block:
    """A block of the paged KV cache. A block with a hash is in the prefix cache."""

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1  # not in the prefix cache
        self.token_ids: list[int] = []

    def update(self, block_hash: int, token_ids: list[int]) -> None:
        self.hash, self.token_ids = block_hash, token_ids

    def reset(self) -> None:
        self.ref_count, self.hash, self.token_ids = 1, -1, []


class BlockManager:
    """Allocates and frees cache blocks, each in constant time.

    A freed block keeps its contents until it is allocated again, so a later sequence with the same prefix can reuse it.
    Free blocks outside of the prefix cache are allocated first, then cached blocks in the order in which they were
    freed.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.salt = secrets.randbits(64)  # so that nobody can construct prompts with equal hashes
        self.reset()

    def reset(self) -> None:
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.duplicates: dict[int, set[int]] = {}  # hash -> further blocks with equal contents
        self.copies: dict[int, int] = {}  # target block id -> source block id, to be copied before the next step

    def req_indices(self, max_num_seqs: int):
        return [*reversed(range(max_num_seqs))]

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = -1) -> int:
        """Hash a block. `prefix` is the hash of the preceding block, or a salt for the first block."""
        return xxhash.xxh3_64_intdigest(packed_ids(token_ids), max(prefix, 0))

    @property
    def used_block_ids(self) -> set[int]:
        return {*range(self.num_blocks)} - self.free_block_ids.keys()

    @property
    def num_free(self) -> int:
        """The number of sequences that the free blocks can extend."""
        return len(self.free_block_ids)

    @property
    def num_cached(self) -> int:
        """The number of free blocks that the prefix cache contains."""
        return sum(self.blocks[i].ref_count == 0 for i in [*self.hash_to_block_id.values()])

    def groups(self) -> list[dict]:
        """Return statistics for each group of layers with a separate block table, or [] if there is only one group."""
        return []

    def tiers(self) -> dict[str, int]:
        """Return counts for the tiers of the prefix cache: device, host memory and files. If the device is the only
        tier, return an empty dict.
        """
        return {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(self, seq: Sequence) -> int:
        """Return how many blocks `seq` needs, including its next token."""
        return self.num_blocks_for(min(seq.num_tokens + 1, seq.max_num_tokens))

    def can_allocate(self, seq: Sequence, num_spare: int = 0) -> bool:
        """Return whether `seq` can be allocated with at least `num_spare` blocks left free."""
        num_shared = sum(self.blocks[block_id].ref_count > 0 for block_id in self._cached_prefix(seq))
        return self.num_blocks_needed(seq) - num_shared + num_spare <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        """Allocate blocks for all tokens of `seq`. Tokens in the prefix cache count as computed."""
        assert not seq.block_table
        for block_id in self._cached_prefix(seq):
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
            block.ref_count += 1
            seq.block_table.append(block_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size
        if not seq.was_admitted:
            seq.num_cached_tokens = seq.num_computed_tokens
        while len(seq.block_table) < self.num_blocks_for(seq.num_tokens):
            seq.block_table.append(self._allocate_block())

    def fork(self, seq: Sequence, other: Sequence) -> None:
        """Share the full blocks of `seq` with `other`, and add a block to `other`.

        Both sequences have the same computed tokens. If the last block of `seq` is not full, the next step first copies
        this block into the new block of `other`.
        """
        num_full = seq.num_computed_tokens // self.block_size
        other.block_table = seq.block_table[:num_full]
        for block_id in other.block_table:
            self.blocks[block_id].ref_count += 1
        other.block_table.append(self._allocate_block())
        other.block_hashes = seq.block_hashes.copy()
        other.num_computed_tokens, other.num_cached_tokens = seq.num_computed_tokens, seq.num_cached_tokens
        if len(seq.block_table) > num_full:
            self.copies[other.block_table[-1]] = seq.block_table[num_full]

    def needs_block(self, seq: Sequence, num_tokens: int) -> bool:
        return len(seq.block_table) * self.block_size < num_tokens

    def prepare_decodes(self, rows: list[ScheduledSequence]) -> list[int]:
        """Return the indices of the rows that need another block. Subclasses may also free blocks."""
        return [i for i, (seq, _, end) in enumerate(rows) if self.needs_block(seq, end)]

    def can_append(self, seq: Sequence) -> bool:
        """Return whether the last token of `seq` fits into the blocks of `seq` or into a free block."""
        return not self.needs_block(seq, seq.num_tokens) or self.num_free > 0

    def may_append(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """Add a block to `seq` if `num_tokens` tokens (by default, `seq.num_tokens`) need another block."""
        if self.needs_block(seq, num_tokens or seq.num_tokens):
            seq.block_table.append(self._allocate_block())

    def hash_blocks(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """Put the full blocks of `seq`, or of its first `num_tokens` tokens, into the prefix cache.

        Blocks enter the cache when their computation is scheduled, so sequences of the same step can share them. This
        is safe, because each layer stores a step's keys and values before it computes attention.
        """
        if not self.enable_prefix_caching:
            return
        num_known = len(seq.token_ids)
        num_full = (num_known if num_tokens is None else min(num_tokens, num_known)) // self.block_size
        self._extend_hashes(seq, num_full)
        for i in range(num_full - 1, -1, -1):
            block = self.blocks[seq.block_table[i]]
            if block.hash != -1:
                break  # this block and all earlier ones are already cached
            self.insert(block, seq.block_hashes[i], self._block_token_ids(seq, i))

    def insert(self, block: Block, block_hash: int, token_ids: list[int]) -> None:
        """Put a full block into the prefix cache."""
        block.update(block_hash, token_ids)
        if self.hash_to_block_id.setdefault(block_hash, block.block_id) != block.block_id:
            self.duplicates.setdefault(block_hash, set()).add(block.block_id)

    def begin_step(self) -> dict[int, int]:
        """Return the copies that the new step must make."""
        copies, self.copies = self.copies, {}
        return copies

    def reserve_chunk(self, seq: Sequence, end: int) -> int:
        """Return where a chunk ends: earlier than `end` only in subclasses, for layers with a state or a window."""
        return end

    def state_row(self, seq: Sequence) -> int:
        """Return the row of the next chunk's initial state, which only layers that keep a state read."""
        return seq.req_index

    def deallocate(self, seq: Sequence) -> None:
        """Free the blocks of `seq`, the first blocks last, because they are reused most."""
        for block_id in reversed(seq.block_table):
            self._release_block(block_id)
        seq.block_table = []
        seq.num_computed_tokens = seq.num_scheduled_tokens = 0

    def _release_block(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_block_ids[block_id] = None
            if block.hash == -1:  # not in the prefix cache: allocate this block before any other
                self.free_block_ids.move_to_end(block_id, last=False)

    def clear_prefix_cache(self) -> None:
        self.hash_to_block_id = {}  # a new object tells viewers that any block may have changed
        self.duplicates.clear()
        for block in self.blocks:
            block.hash = -1

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Return the ids of the cached blocks of `seq`, without its last token, which must be computed."""
        block_ids: list[int] = []
        if not self.enable_prefix_caching or seq.skips_prefix_hits:
            return block_ids
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            self._extend_hashes(seq, i + 1)
            block_id = self.hash_to_block_id.get(seq.block_hashes[i])
            if block_id is None or self.blocks[block_id].token_ids != self._block_token_ids(seq, i):
                break
            block_ids.append(block_id)
        return block_ids

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for i in range(len(seq.block_hashes), num_blocks):
            prefix_hash = seq.block_hashes[-1] if i else seq.cache_salt ^ self.salt
            seq.block_hashes.append(self.compute_hash(self._block_token_ids(seq, i), prefix_hash))

    def _block_token_ids(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _allocate_block(self) -> int:
        assert self.free_block_ids, "no block is free: can_allocate and can_append say whether one is"
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash != -1:
            self.evict(block, block.hash)
        block.reset()
        return block_id

    def evict(self, block: Block, block_hash: int) -> None:
        """Remove the block from the prefix cache. If the block has a duplicate, later lookups find the duplicate."""
        duplicates = self.duplicates.get(block_hash, set())
        if self.hash_to_block_id[block_hash] != block.block_id:
            duplicates.remove(block.block_id)
        elif duplicates:
            self.hash_to_block_id[block_hash] = duplicates.pop()
        else:
            del self.hash_to_block_id[block_hash]
        if not duplicates:
            self.duplicates.pop(block_hash, None)

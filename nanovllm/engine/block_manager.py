"""Which cache block belongs to whom: reference counts, and a prefix cache over full blocks."""

from array import array
from collections import OrderedDict

import xxhash

from nanovllm.engine.sequence import Sequence


class Block:
    """One block of the paged cache. A hash makes it findable, and its token ids are compared with what was sought."""

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids: list[int] = []


class BlockManager:
    """Hands out blocks in O(1) each.

    A freed block keeps its contents until it is handed out again, least recently freed first, so a later sequence
    with the same prefix can take it back from among the free ones.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.duplicates: dict[int, set[int]] = {}  # by hash: further blocks of the same contents
        self.copies: dict[int, int] = {}  # block -> the one whose contents it needs before the next step

    @staticmethod
    def compute_hash(token_ids: list[int], prefix_hash: int = 0) -> int:
        """Hash of a block that follows the blocks behind `prefix_hash`."""
        return xxhash.xxh3_64_intdigest(array("q", (prefix_hash - 2**63, *token_ids)).tobytes())

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence, headroom: int = 0) -> bool:
        """Whether the whole of `seq` fits, with the token that follows, and leaves `headroom` blocks free."""
        shared = sum(self.blocks[block_id].ref_count > 0 for block_id in self._match_prefix(seq))
        return self.num_blocks_for(seq.num_tokens + 1) - shared + headroom <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        """Give `seq` blocks for all its tokens; those found in the prefix cache count as computed."""
        assert not seq.block_table
        for block_id in self._match_prefix(seq):
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
            block.ref_count += 1
            seq.block_table.append(block_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size
        while len(seq.block_table) < self.num_blocks_for(seq.num_tokens):
            seq.block_table.append(self._take_free_block())

    def fork(self, seq: Sequence, other: Sequence) -> None:
        """Give `other` all that is computed of `seq`, whose tokens it has: the full blocks, and a block of its own.

        Where the last block of `seq` is full in part, the new one joins `copies`.
        """
        num_full = seq.num_computed_tokens // self.block_size
        other.block_table = seq.block_table[:num_full]
        for block_id in other.block_table:
            self.blocks[block_id].ref_count += 1
        other.block_table.append(self._take_free_block())
        other.block_hashes = seq.block_hashes.copy()
        other.num_computed_tokens = seq.num_computed_tokens
        other.num_cached_tokens = seq.num_cached_tokens
        if len(seq.block_table) > num_full:
            self.copies[other.block_table[-1]] = seq.block_table[num_full]

    def can_append(self, seq: Sequence) -> bool:
        """Whether the last token of `seq` has a slot, or can get one."""
        return len(seq.block_table) * self.block_size >= seq.num_tokens or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Add a block if the last token of `seq` begins one."""
        if len(seq.block_table) * self.block_size < seq.num_tokens:
            seq.block_table.append(self._take_free_block())

    def publish(self, seq: Sequence) -> None:
        """Make the full blocks of `seq` findable, as far as tokens are known and computed.

        The blocks of a prompt are published when the step that computes them is scheduled, so that sequences of the
        same step share them already: every layer stores a step's keys and values before it attends, and whoever finds
        the block is in that step or in a later one of the same stream.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        self._extend_hashes(seq, num_full)
        for i in range(num_full - 1, -1, -1):
            block = self.blocks[seq.block_table[i]]
            if block.hash is not None:
                break  # published before, and so are those in front of it
            block.hash = seq.block_hashes[i]
            block.token_ids = self._block_tokens(seq, i)
            if self.hash_to_block_id.setdefault(block.hash, block.block_id) != block.block_id:
                self.duplicates.setdefault(block.hash, set()).add(block.block_id)

    def deallocate(self, seq: Sequence) -> None:
        """Drop the references of `seq`, its tail first: the head of a prefix is worth keeping longest."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_ids[block_id] = None
                if block.hash is None:  # nothing to be found in it: the first to be used again
                    self.free_block_ids.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_computed_tokens = 0

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.hash_to_block_id.clear()
        self.duplicates.clear()
        for block in self.blocks:
            block.hash = None

    def reset(self) -> None:
        """Take every block back, and trust no contents: for when a step did not come to its end."""
        self.forget_prefixes()
        self.copies.clear()
        for block in self.blocks:
            block.ref_count = 0
        self.free_block_ids = OrderedDict.fromkeys(range(len(self.blocks)))

    def _match_prefix(self, seq: Sequence) -> list[int]:
        """Ids of the cached blocks that `seq` begins with, always leaving at least one token to compute."""
        block_ids: list[int] = []
        if not self.enable_prefix_caching or seq.params.prompt_logprobs is not None:
            return block_ids  # log-probabilities need every position computed
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            self._extend_hashes(seq, i + 1)
            block_id = self.hash_to_block_id.get(seq.block_hashes[i])
            if block_id is None or self.blocks[block_id].token_ids != self._block_tokens(seq, i):
                break
            block_ids.append(block_id)
        return block_ids

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for i in range(len(seq.block_hashes), num_blocks):
            prefix_hash = seq.block_hashes[-1] if i else 0
            seq.block_hashes.append(self.compute_hash(self._block_tokens(seq, i), prefix_hash))

    def _block_tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash is not None:
            self._unpublish(block)
        block.ref_count = 1
        return block_id

    def _unpublish(self, block: Block) -> None:
        """The block's contents can't be found in it any more; in a duplicate they still can."""
        duplicates = self.duplicates.get(block.hash, set())
        if self.hash_to_block_id[block.hash] != block.block_id:
            duplicates.remove(block.block_id)
        elif duplicates:
            self.hash_to_block_id[block.hash] = duplicates.pop()
        else:
            del self.hash_to_block_id[block.hash]
        if not duplicates:
            self.duplicates.pop(block.hash, None)
        block.hash = None

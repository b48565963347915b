"""Who gets which block: reference counts, the prefix cache and its eviction. Here the tests play scheduler."""

import random
from itertools import count
from time import process_time

import pytest
from scaling import assert_grows_less

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 4
request_ids = count()


def sequence(token_ids) -> Sequence:
    return Sequence(list(token_ids), request_id=next(request_ids), max_len=10**6)


def compute(manager: BlockManager, token_ids) -> Sequence:
    """A new sequence whose keys and values are all in the cache."""
    seq = sequence(token_ids)
    manager.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    manager.hash_blocks(seq, seq.num_computed_tokens)
    return seq


def cached(manager: BlockManager, token_ids) -> int:
    """How many leading tokens of a prompt would be found in the cache; also makes them the most recently used."""
    seq = sequence(token_ids)
    manager.allocate(seq)
    num_tokens = seq.num_computed_tokens
    manager.deallocate(seq)
    return num_tokens


def ref_counts(manager: BlockManager) -> list[int]:
    return [block.ref_count for block in manager.blocks]


# -- finding a prefix ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 14))
def test_prompt_is_found_up_to_its_last_token(length):
    """Whole blocks are found, but never the last token: something must be computed to sample from."""
    manager = BlockManager(8, BLOCK_SIZE)
    prompt = list(range(length))
    compute(manager, prompt)
    assert cached(manager, prompt) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached(manager, [*prompt, 99]) == length // BLOCK_SIZE * BLOCK_SIZE


def test_fully_cached_prompt_writes_no_shared_block():
    """The block of the token that is computed again must be the sequence's own."""
    manager = BlockManager(8, BLOCK_SIZE)
    first, second = compute(manager, range(8)), compute(manager, range(8))
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    assert sorted(ref_counts(manager), reverse=True) == [2, 1, 1, 0, 0, 0, 0, 0]


def test_prefix_is_more_than_the_tokens_of_a_block():
    """The same tokens after another prefix, or at another position, have other keys and values."""
    manager = BlockManager(16, BLOCK_SIZE)
    compute(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached(manager, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert cached(manager, [5, 6, 7, 8, 1, 2, 3, 4, 9]) == 0
    assert cached(manager, [1, 2, 3, 4, 0, 6, 7, 8, 9]) == 4
    assert cached(manager, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8


@pytest.mark.parametrize("collision", [lambda prefix_hash: 7, lambda prefix_hash: prefix_hash + 1])
def test_hash_collisions_are_no_hits(monkeypatch, collision):
    """Were all blocks (or all of the same depth) to collide, their token ids still tell them apart."""
    monkeypatch.setattr(
        BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix_hash=0: collision(prefix_hash))
    )
    manager = BlockManager(16, BLOCK_SIZE)
    held = compute(manager, range(8))
    assert cached(manager, [*range(4), 0]) == (4 if collision(0) == 1 else 0)
    for start in (10, 20):  # found neither the first time, nor after it was cached under the same hash
        other = compute(manager, range(start, start + 9))
        assert not set(other.block_table) & set(held.block_table)
        manager.deallocate(other)
    assert cached(manager, range(10, 19)) == 0


def test_hash_is_of_all_tokens_in_order_and_of_the_prefix():
    """Also at the ends of its 64 bits, which the chain feeds back as a prefix."""
    blocks = ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3])
    hashes = {BlockManager.compute_hash(block, prefix) for block in blocks for prefix in (0, 1, 2**63, 2**64 - 1)}
    assert len(hashes) == 20
    assert all(0 <= value < 2**64 for value in hashes)
    assert BlockManager.compute_hash([1, 2, 3]) == BlockManager.compute_hash([1, 2, 3], 0)


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    first, second = compute(manager, range(9)), compute(manager, range(9))
    assert not set(first.block_table) & set(second.block_table)
    assert second.num_computed_tokens == 9 and not manager.hash_to_block_id and not second.block_hashes
    manager.deallocate(first)
    assert cached(manager, range(9)) == 0


# -- caching ---------------------------------------------------------------------------------------------------------


def test_caches_only_blocks_that_are_full_computed_and_known():
    """A token in flight is counted before it is known, and is known before its keys and values are computed."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = sequence(range(6))
    manager.allocate(seq)
    for num_known, num_computed, num_full in [(6, 3, 0), (6, 4, 1), (6, 6, 1), (8, 7, 1), (7, 8, 1), (8, 8, 2)]:
        seq.token_ids = list(range(num_known))
        seq.num_computed_tokens = num_computed
        manager.hash_blocks(seq, seq.num_computed_tokens)
        assert list(manager.hash_to_block_id.values()) == seq.block_table[:num_full]
        assert cached(manager, range(9)) == num_full * BLOCK_SIZE


def test_same_content_in_two_blocks():
    """Two sequences may compute the same block; one of the two is the one to be found, evicting the other is free."""
    manager = BlockManager(3, BLOCK_SIZE)
    first, second = compute(manager, range(8)), compute(manager, range(8))
    original, duplicate = first.block_table[1], second.block_table[1]
    assert manager.blocks[original].hash == manager.blocks[duplicate].hash
    manager.deallocate(second)
    filler = compute(manager, [50])
    assert filler.block_table == [duplicate]
    manager.deallocate(filler)
    assert cached(manager, range(9)) == 8

    manager.deallocate(first)  # now the original goes, and its entry with it
    fillers = [compute(manager, [60 + i]) for i in range(2)]
    assert original in fillers[0].block_table + fillers[1].block_table
    assert original not in manager.hash_to_block_id.values()
    for seq in fillers:
        manager.deallocate(seq)
    assert cached(manager, range(9)) == 4


def test_evicting_the_original_leaves_nothing_that_points_to_it():
    """The one that can be found is evicted while its duplicate lives on."""
    manager = BlockManager(3, BLOCK_SIZE)
    first, second = compute(manager, range(8)), compute(manager, range(8))
    original = first.block_table[1]
    manager.deallocate(first)
    compute(manager, [50])
    assert manager.blocks[original].hash == -1
    assert original not in manager.hash_to_block_id.values()
    manager.deallocate(second)
    again = compute(manager, range(8))
    assert original not in again.block_table
    assert {manager.blocks[b].hash for b in again.block_table} == manager.hash_to_block_id.keys()


def test_duplicate_is_found_when_the_first_is_evicted():
    """Of two blocks with the same contents, the second replaces the first in the prefix cache."""
    manager = BlockManager(6, BLOCK_SIZE)
    first, second = compute(manager, range(4)), compute(manager, range(4))
    second.token_ids = list(range(8))
    second.num_tokens = second.num_computed_tokens = 8
    manager.may_append(second)
    manager.hash_blocks(second, second.num_computed_tokens)
    assert cached(manager, range(9)) == 8 and len(manager.duplicates) == 1
    manager.deallocate(first)
    manager.deallocate(compute(manager, range(50, 66)))  # takes all that is free
    assert set(second.block_table) <= set(manager.hash_to_block_id.values())
    assert cached(manager, range(9)) == 8 and not manager.duplicates


def test_forgotten_prefixes_are_not_found():
    manager = BlockManager(8, BLOCK_SIZE)
    manager.deallocate(compute(manager, range(9)))
    manager.clear_prefix_cache()
    assert cached(manager, range(9)) == 0
    compute(manager, range(9))  # and what is computed again can be
    assert cached(manager, range(9)) == 8


# -- sharing and freeing ---------------------------------------------------------------------------------------------


def test_shared_block_is_freed_by_its_last_holder():
    manager = BlockManager(8, BLOCK_SIZE)
    seqs = [compute(manager, range(9 + i)) for i in range(3)]
    head = seqs[0].block_table[0]
    for num_holders in (3, 2, 1):
        assert manager.blocks[head].ref_count == num_holders and head not in manager.free_block_ids
        manager.deallocate(seqs.pop())
    assert ref_counts(manager) == [0] * 8 and sorted(manager.free_block_ids) == list(range(8))


def test_freed_block_is_taken_back():
    """A found block that is free costs a free one, a found block that is held costs nothing."""
    manager = BlockManager(3, BLOCK_SIZE)
    seq = compute(manager, range(9))
    head = seq.block_table[:2]
    manager.deallocate(seq)
    assert seq.block_table == [] and seq.num_computed_tokens == 0
    again = sequence(range(9))
    assert manager.can_allocate(again) and not manager.can_allocate(again, num_spare=1)
    manager.allocate(again)
    assert again.block_table[:2] == head and again.num_computed_tokens == 8
    assert not manager.free_block_ids and ref_counts(manager) == [1, 1, 1]

    manager = BlockManager(4, BLOCK_SIZE)
    compute(manager, range(9))
    assert manager.can_allocate(sequence(range(9))) and not manager.can_allocate(sequence(range(9)), num_spare=1)
    assert not manager.can_allocate(sequence(range(10, 19)))


def test_growing_takes_a_block_when_the_last_one_is_full():
    manager = BlockManager(2, BLOCK_SIZE)
    seq = sequence(range(3))
    manager.allocate(seq)
    for num_tokens in range(4, 9):
        seq.num_tokens = num_tokens
        assert manager.can_append(seq)
        manager.may_append(seq)
        assert len(seq.block_table) == manager.num_blocks_for(num_tokens) == (1 if num_tokens == 4 else 2)
    seq.num_tokens = 9
    assert not manager.can_append(seq)


# -- eviction --------------------------------------------------------------------------------------------------------


def test_least_recently_freed_goes_first():
    """By block id or by order of allocation the blocks of the first sequence would go, and its prefix be lost."""
    manager = BlockManager(6, BLOCK_SIZE)
    first, second = compute(manager, range(9)), compute(manager, range(10, 19))
    manager.deallocate(second)
    manager.deallocate(first)
    compute(manager, range(20, 29))
    assert cached(manager, range(9)) == 8
    assert cached(manager, range(10, 19)) == 0


def test_being_used_again_counts():
    """By order of first freeing the blocks of the first sequence would go, though they were found since."""
    manager = BlockManager(6, BLOCK_SIZE)
    first, second = compute(manager, range(9)), compute(manager, range(10, 19))
    manager.deallocate(first)
    manager.deallocate(second)
    assert cached(manager, range(9)) == 8
    compute(manager, range(20, 29))
    assert cached(manager, range(9)) == 8
    assert cached(manager, range(10, 19)) == 0


@pytest.mark.parametrize("num_taken, num_left", [(1, 12), (2, 8), (3, 4), (4, 0)])
def test_tail_goes_before_head(num_taken, num_left):
    """Blocks behind a gap can't be found, so the head of a prefix is worth the most."""
    manager = BlockManager(4, BLOCK_SIZE)
    manager.deallocate(compute(manager, range(13)))
    taken = compute(manager, range(50, 50 + num_taken * BLOCK_SIZE))
    manager.deallocate(taken)
    assert cached(manager, range(13)) == num_left


def test_evicted_block_is_forgotten():
    manager = BlockManager(3, BLOCK_SIZE)
    manager.deallocate(compute(manager, range(12)))
    assert len(manager.hash_to_block_id) == 3
    seq = sequence(range(20, 29))
    manager.allocate(seq)
    assert not manager.hash_to_block_id and all(block.hash == -1 for block in manager.blocks)
    manager.deallocate(seq)
    assert cached(manager, range(12)) == 0


def test_a_block_takes_no_longer_where_there_are_many():
    """Nothing may search through the blocks: all are taken and freed in any order; fresh, found and evicted."""

    def seconds_per_block(num_blocks: int) -> float:
        manager = BlockManager(num_blocks, BLOCK_SIZE)
        begin = process_time()
        for offset in (0, 0, 10**6):
            starts = range(offset, offset + 5 * num_blocks, 50)  # ten blocks each
            seqs = [compute(manager, range(start, start + 37)) for start in starts]
            assert not manager.free_block_ids
            random.Random(0).shuffle(seqs)
            for seq in seqs:
                manager.deallocate(seq)
        assert len(manager.free_block_ids) == num_blocks
        return (process_time() - begin) / num_blocks

    assert_grows_less(8, seconds_per_block, 500, 16_000, rounds=2)  # a search would take 32 times as long

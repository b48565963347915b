"""The router alone: which replica gets a request."""

import random

import pytest

from nanovllm.serve.replicas.routing import PrefixRouter, RoundRobin

BLOCK = 4


def make_router(num_replicas: int = 2, **settings) -> PrefixRouter:
    return PrefixRouter(num_replicas, **{"block_size": BLOCK, "max_blocks": 100} | settings)


def tokens(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1000) for i in range(length)]


def test_prefix_decides():
    router = make_router(3)
    prompt = tokens(0, 20)
    first = router.choose(prompt, [0, 0, 0])
    assert all(router.choose(prompt[:16] + tokens(i, 10), [i % 3, 1, 2]) == first for i in range(5))
    router.forget(first)
    loads = [1, 1, 1]
    loads[first] = 2
    assert router.choose(prompt, loads) != first  # its cache is empty: the least loaded one


def test_longest_prefix_wins():
    router = make_router()
    prompt = tokens(0, 20)
    assert router.choose(prompt[:8], [0, 1]) == 0
    router.computed(1, prompt[:16])
    assert router.choose(prompt, [0, 1]) == 1
    assert router.choose(prompt[:8], [0, 1]) == 0  # both have all of it


def test_only_full_blocks_count():
    router = make_router()
    prompt = tokens(0, BLOCK - 1)
    assert router.choose(prompt, [0, 1]) == 0
    assert router.choose(prompt, [1, 0]) == 1


def test_a_block_is_found_only_behind_its_prefix():
    router = make_router()
    a, b = tokens(1, BLOCK), tokens(2, BLOCK)
    assert router.choose(a + b, [1, 0]) == 1
    assert router.choose(b + a, [0, 1]) == 0
    assert router.choose([*b, *tokens(3, BLOCK)], [5, 6]) == 0


def test_imbalance():
    router = make_router(imbalance=2.0, slack=3)
    prompt = tokens(0, 8)
    assert router.choose(prompt, [0, 0]) == 0
    assert router.choose(prompt, [13, 5]) == 0  # 2 * 5 + 3
    assert router.choose(prompt, [14, 5]) == 1
    assert router.choose(prompt, [13, 14]) == 0  # now both have it


def test_replicas_that_take_no_request():
    router = make_router(3)
    prompt = tokens(0, 8)
    assert router.choose(prompt, [0, 0, None]) == 0
    assert router.choose(prompt, [None, 7, 9]) == 1
    assert router.choose(prompt, [None, None, 0]) == 2
    assert RoundRobin().choose(prompt, [None, 3, 2]) == 1


def test_prompts_without_a_prefix_are_spread():
    router = make_router(4)
    chosen = [router.choose(tokens(i, 12), [0, 0, 0, 0]) for i in range(40)]
    assert [chosen.count(i) for i in range(4)] == [10] * 4
    loads = [0, 0, 0, 0]
    for i in range(100, 140):
        loads[router.choose(tokens(i, 12), loads)] += 1
    assert loads == [10] * 4


def test_memory_is_bounded():
    router = make_router(1, max_blocks=10)
    old, new = tokens(0, 8 * BLOCK), tokens(1, 6 * BLOCK)
    router.choose(old, [0])
    router.choose(new, [0])
    assert len(router._cached[0]) == 10
    hashes = router._hashes(old)
    assert router._num_cached(0, hashes) == 4  # the tail was forgotten, the head was not
    assert router._num_cached(0, router._hashes(new)) == 6


def test_round_robin():
    router = RoundRobin()
    assert [router.choose([], [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose([], [None, 0, 0]) for _ in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_hit_rate_of_conversations(num_replicas):
    """50 conversations of 6 turns, interleaved at random: found tokens beside those that one engine finds."""

    def hit_rate(router, num_engines: int) -> float:
        rng = random.Random(0)
        histories = [tokens(i, 30) for i in range(50)]
        turns = [i for i in range(50) for _ in range(6)]
        rng.shuffle(turns)
        caches: list[set[tuple]] = [set() for _ in range(num_engines)]
        found = total = 0
        loads = [0] * num_engines
        homes: dict[int, set[int]] = {}
        for i in turns:
            history = histories[i]
            choice = router.choose(history, loads)
            homes.setdefault(i, set()).add(choice)
            loads = [max(0, load - 1) for load in loads]
            loads[choice] += 1
            cache = caches[choice]
            blocks = [tuple(history[: end + BLOCK]) for end in range(0, len(history) - BLOCK, BLOCK)]
            hits = [block in cache for block in blocks]
            found += BLOCK * (hits.index(False) if False in hits else len(hits))
            total += len(history)
            answer = [rng.randrange(1000) for _ in range(20)]
            whole = history + answer
            cache |= {tuple(whole[: end + BLOCK]) for end in range(0, len(whole) - BLOCK + 1, BLOCK)}
            router.computed(choice, whole)
            histories[i] = whole + [rng.randrange(1000) for _ in range(10)]
        if isinstance(router, PrefixRouter):
            assert all(len(own) == 1 for own in homes.values())  # a conversation stays where it began
        return found / total

    one = hit_rate(RoundRobin(), 1)
    routed = hit_rate(make_router(num_replicas, max_blocks=10_000), num_replicas)
    print(f"{num_replicas} replicas: {routed:.3f} routed, {one:.3f} one engine")
    assert routed > 0.95 * one
    by_turns = hit_rate(RoundRobin(), num_replicas)
    print(f"{by_turns:.3f} by turns")
    assert by_turns < 0.8 * one

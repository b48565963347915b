"""Defines routers, which choose a replica for each request. Routers need neither Ray nor torch."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from nanovllm.engine.block_manager import BlockManager

logger = logging.getLogger("nanovllm")
IMBALANCE, SLACK = 1.5, 8


class Router(Protocol):
    """The interface of routers. Replicas are numbered from 0."""

    def choose(self, token_ids: list[int], loads: Sequence[int | None]) -> int:
        """Choose a replica for a prompt. Return the replica's index.

        `loads[i]` is the number of answers that replica i computes, or `None` if replica i accepts no requests now. The
        chosen replica's load must not be `None`.
        """
        ...

    def computed(self, replica: int, token_ids: list[int]) -> None:
        """Record that the replica has computed `token_ids`, which are the tokens of a prompt and its answer."""
        ...

    def forget(self, replica: int) -> None:
        """Record that the replica was lost, and that its cache is empty."""
        ...


class GuardedRouter:
    """Wraps a router. If the router raises an error, the least loaded replica is chosen."""

    def __init__(self, router: Router):
        self._router = router

    def choose(self, token_ids: list[int], loads: Sequence[int | None]) -> int:
        chosen = self._call("choose", token_ids, loads)
        if chosen in range(len(loads)) and loads[chosen] is not None:
            return chosen
        logger.warning("router: chose %r of replicas with the loads %r; the least loaded one is taken", chosen, loads)
        return min((load, i) for i, load in enumerate(loads) if load is not None)[1]

    def computed(self, replica: int, token_ids: list[int]) -> None:
        self._call("computed", replica, token_ids)

    def forget(self, replica: int) -> None:
        self._call("forget", replica)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._router, method)(*arguments)
        except Exception as error:
            logger.warning("router: %s has raised %r", method, error)


class RoundRobin:
    """Chooses the replicas in round-robin order, regardless of caches."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, token_ids: list[int], loads: Sequence[int | None]) -> int:
        order = [(self._last + i) % len(loads) for i in range(1, len(loads) + 1)]
        self._last = next(i for i in order if loads[i] is not None)
        return self._last

    def computed(self, replica: int, token_ids: list[int]) -> None:
        pass

    def forget(self, replica: int) -> None:
        pass


class PrefixRouter:
    """Chooses the replica that has cached the longest prefix of the prompt. The replica's load must not be too high.

    A load is too high if it exceeds `imbalance * least + slack` answers, where `least` is the lowest load. If the load
    is too high, or if no replica has cached a prefix, the router chooses the least loaded replica. If loads are equal,
    the router chooses the replica that has received the fewest requests so far.

    The router does not ask replicas what they have cached. Instead, the router computes the same chain of hashes as the
    block manager, with one hash for each full block of `block_size` tokens. For each replica, the router remembers the
    hashes of prompts and answers in an LRU list. The list has at most `max_blocks` hashes, one for each cache block. A
    hash occupies about 150 bytes.
    """

    def __init__(
        self, num_replicas: int, block_size: int, max_blocks: int, imbalance: float = IMBALANCE, slack: int = SLACK
    ):
        self.block_size, self.max_blocks = block_size, max_blocks
        self.imbalance, self.slack = imbalance, slack
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._num_chosen = [0] * num_replicas

    def choose(self, token_ids: list[int], loads: Sequence[int | None]) -> int:
        hashes = self._hashes(token_ids)
        load = {i: value for i, value in enumerate(loads) if value is not None}
        least = min(load, key=lambda i: (load[i], self._num_chosen[i]))
        best = max(load, key=lambda i: (self._num_cached(i, hashes), -load[i], -self._num_chosen[i]))
        if load[best] > self.imbalance * load[least] + self.slack:
            best = least
        self._num_chosen[best] += 1
        self._remember(best, hashes)  # before the tokens are computed, so that requests with this prefix follow
        return best

    def computed(self, replica: int, token_ids: list[int]) -> None:
        self._remember(replica, self._hashes(token_ids))

    def forget(self, replica: int) -> None:
        self._cached[replica].clear()

    def _hashes(self, token_ids: list[int]) -> list[int]:
        hashes: list[int] = []
        if not self.max_blocks:  # replicas have no prefix cache
            return hashes
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = token_ids[start : start + self.block_size]
            hashes.append(BlockManager.compute_hash(block, hashes[-1] if hashes else 0))
        return hashes

    def _num_cached(self, replica: int, hashes: list[int]) -> int:
        cached = self._cached[replica]
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in cached), len(hashes))

    def _remember(self, replica: int, hashes: list[int]) -> None:
        cached = self._cached[replica]
        for block_hash in reversed(hashes):  # in reverse, so that the first block of a prefix is evicted last
            cached[block_hash] = None
            cached.move_to_end(block_hash)
        while len(cached) > self.max_blocks:
            cached.popitem(last=False)

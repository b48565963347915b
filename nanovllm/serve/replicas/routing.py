"""Which replica computes a request: plain counts and hashes, without Ray and without torch."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from nanovllm.engine.block_manager import BlockManager

logger = logging.getLogger("nanovllm")
IMBALANCE, SLACK = 1.5, 8


class Router(Protocol):
    """What a ReplicaGroup needs of a router. Replicas are numbered from 0."""

    def choose(self, token_ids: list[int], loads: Sequence[int | None]) -> int:
        """The replica for a prompt. `loads`: how many answers each has to compute; None if it takes no request now.

        At least one load is a number, and the choice must be one of those replicas.
        """
        ...

    def computed(self, replica: int, token_ids: list[int]) -> None:
        """The replica has computed these tokens, a prompt and its answer."""
        ...

    def forget(self, replica: int) -> None:
        """The replica was lost: its cache is empty."""
        ...


class GuardedRouter:
    """Another router whose errors cost no request: where it fails to choose, the least loaded replica is chosen."""

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
    """Each replica in turn, regardless of what is cached."""

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
    """The replica whose cache holds the longest prefix of the prompt, unless it has much more to do than another.

    "Much more" is a load of more than `imbalance * least + slack` answers, where `least` is the lowest load. Then, and
    if no replica has a part of the prompt cached, the least loaded replica gets the request; of several with the same
    load, the one that has had the fewest requests.

    The router does not ask a replica what it has cached. It computes the hashes of the block manager, a chain over full
    blocks of `block_size` tokens, and remembers those of all prompts and answers of a replica in an LRU list of
    `max_blocks`, the size of the replica's cache. Memory: about 150 bytes a block.
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
        self._remember(best, hashes)  # before it is computed, so that requests that follow at once are routed by it
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
        for block_hash in reversed(hashes):  # the first block of a prefix is evicted last
            cached[block_hash] = None
            cached.move_to_end(block_hash)
        while len(cached) > self.max_blocks:
            cached.popitem(last=False)

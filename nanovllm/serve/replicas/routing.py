"""Which replica computes a request: plain counts and hashes, without Ray and without torch."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from nanovllm.engine.block_manager import BlockManager

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


class RoundRobin:
    """One after the other, whatever they have cached."""

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

    That is: more than `imbalance` times the answers of the least loaded replica, and `slack` more. Then, and if no
    replica knows the prompt, the least loaded one gets it; of several, the one that has had the fewest requests.

    A replica's cache is known by the hashes that its block manager would compute: a chain over full blocks of
    `block_size` tokens. Those of the prompts and answers of each replica are remembered, least recently used first to
    go, up to `max_blocks`, the size of its cache. Memory: about 150 bytes a block.
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
        self._remember(best, hashes)  # requests with the same prefix that come before it is computed follow
        return best

    def computed(self, replica: int, token_ids: list[int]) -> None:
        self._remember(replica, self._hashes(token_ids))

    def forget(self, replica: int) -> None:
        self._cached[replica].clear()

    def _hashes(self, token_ids: list[int]) -> list[int]:
        hashes: list[int] = []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = token_ids[start : start + self.block_size]
            hashes.append(BlockManager.compute_hash(block, hashes[-1] if hashes else 0))
        return hashes

    def _num_cached(self, replica: int, hashes: list[int]) -> int:
        cached = self._cached[replica]
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in cached), len(hashes))

    def _remember(self, replica: int, hashes: list[int]) -> None:
        cached = self._cached[replica]
        for block_hash in reversed(hashes):  # the first block of a prefix is the last to be forgotten
            cached[block_hash] = None
            cached.move_to_end(block_hash)
        while len(cached) > self.max_blocks:
            cached.popitem(last=False)

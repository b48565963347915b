"""Defines what a store of evicted cache blocks must be able to do."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class CachedBlock(NamedTuple):
    """The contents of a full block, and the block of the device that has them or gets them.

    Blocks with equal contents have equal hashes. A hash covers all tokens from the start of the text, the cache salt,
    and a random number of this engine. Blocks with equal hashes need not have equal token ids.
    """

    block_hash: int
    token_ids: list[int]
    block_id: int


class Connector(ABC):
    """Connects the prefix cache to a store of blocks: host memory, another process, or another machine.

    The TieredBlockManager calls these methods in the engine's thread, and no method may wait for a copy. A copy starts
    after the steps that were launched before the call. Copies of one block follow each other in the order of the calls.

    `put` and `get` raise OSError if they fail. Then the blocks are computed again when they are needed. Any other error
    is treated like an error in a step.
    """

    @abstractmethod
    def contains(self, block_hash: int, token_ids: list[int]) -> bool:
        """Return whether the store has a block with this hash and these token ids, perhaps still on its way there."""

    @abstractmethod
    def put(self, blocks: list[CachedBlock]) -> None:
        """Begin to copy blocks from the device. The store may drop any of them, or others to make room for them.

        A block that the store already has counts as used now.
        """

    @abstractmethod
    def get(self, blocks: list[CachedBlock]) -> Callable[[], bool]:
        """Begin to copy stored blocks to the device.

        Return a function that returns whether all copies have ended, and raises OSError if they failed. Also raises
        OSError if the store has dropped one of the blocks.
        """

    @abstractmethod
    def order_steps(self, block_ids: list[int]) -> None:
        """Let steps that are launched from now on use these blocks of the device after all copies of these blocks.

        The device may have to wait for copies from the device. It need not wait for copies to the device, because they
        have ended according to `get`, at least on rank 0.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop all blocks, because the weights have changed. Copies may still be on their way."""

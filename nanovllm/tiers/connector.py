"""Defines the interface of a store for evicted cache blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class CachedBlock(NamedTuple):
    """Describes the contents that the prefix cache stores for a full block of tokens, and their place on the device.

    Equal contents have equal hashes. A hash depends on all tokens from the start of the text, the cache salt, and a
    random number of this engine. Contents with equal hashes may have different token ids.

    If a model has recurrent states or window tables, the prefix cache may store two contents for the same tokens. The
    block in `Sequence.block_table` has hash `h`. The second contents (a snapshot of the state, or blocks of the window
    tables) have hash `~h`. The block may be stored without the second contents, and the second contents without the
    block.
    """

    block_hash: int
    token_ids: list[int]
    block_ids: tuple[int, ...]  # ids of blocks; the state in row `r` has id `num_blocks + r`


class Connector(ABC):
    """Connects the prefix cache to a store of blocks: host memory, another process, or another machine.

    The TieredBlockManager calls the methods of a connector in the engine's thread. No method may wait for a copy. A
    copy runs after all steps that were launched before the method was called. Copies of the same block run in the order
    of the calls.

    `put` and `get` raise OSError if they fail. After an OSError, blocks are computed again when a sequence needs them.
    Any other error is treated like an error in a step.
    """

    @abstractmethod
    def contains(self, block_hash: int, token_ids: list[int]) -> bool:
        """Return whether the store has a block with this hash and these token ids.

        The copy of the block to the store may still be running.
        """

    @abstractmethod
    def put(self, blocks: list[CachedBlock]) -> None:
        """Begin to copy blocks from the device to the store. The store may drop any blocks, including the new ones.

        A block that the store already has becomes the most recently used one.
        """

    @abstractmethod
    def get(self, blocks: list[CachedBlock]) -> Callable[[], bool]:
        """Begin to copy stored blocks to the device.

        Return a function that tells whether all copies have ended. The function raises OSError if a copy has failed.
        `get` itself raises OSError if the store has dropped one of the blocks.
        """

    @abstractmethod
    def order_steps(self, block_ids: list[int]) -> None:
        """Make all later steps wait for copies from and to these blocks of the device.

        Copies from the device may still be running. Copies to the device have ended on rank 0, because the caller has
        waited for the function that `get` returned.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop all blocks, because the weights have changed. Some copies may still be running."""

    def usage(self) -> dict[str, int]:
        """Return counts that `LLM.stats` and the server's page show. A connector has no counts by default."""
        return {}

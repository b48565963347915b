"""Lets the prefix cache tell images apart. (The token ids of all images are equal.)"""

from collections.abc import Callable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.vision.prompt_images import images_in


class ImageBlocks(BlockManager):
    """Replaces methods of an engine's block manager. The manager may have any class.

    A block's contents are its token ids, and the digests of images that have a token in the block. Hashes and
    comparisons include the digests.
    """

    forget_images: Callable[[], None]  # drops the embeddings of all images, because the weights may change

    def _block_token_ids(self, seq: Sequence, i: int) -> list[int]:
        token_ids = super()._block_token_ids(seq, i)
        for image, _ in images_in(seq, i * self.block_size, (i + 1) * self.block_size):
            token_ids = [*token_ids, *image.key]
        return token_ids

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self.forget_images()

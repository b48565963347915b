"""Lets the prefix cache distinguish images, although all images have the same token ids."""

from collections.abc import Callable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.vision.prompt_images import images_in


class ImageBlocks(BlockManager):
    """Replaces methods of an engine's block manager, which may have any class.

    The contents of a block are its token ids, and the digests of images that have a token in the block. The digests are
    part of the block's hash, and are compared like token ids.
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

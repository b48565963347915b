"""Lets the prefix cache tell images apart, although the token ids of all images are equal."""

from collections.abc import Callable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.vision.image_budget import new_images
from nanovllm.vision.prompt_images import images_in


class ImageBlocks(BlockManager):
    """Replaces methods of an engine's block manager, which may have any class.

    The contents of a block are its token ids, followed by the digests of the images that have a token in the block.
    Hashes and comparisons include the digests.
    """

    forget_images: Callable[[], None]  # drops the embeddings of all images, because the weights may change
    cost_of_image: Callable[[int], int]  # by its number of tokens: see image_budget.py

    def _block_token_ids(self, seq: Sequence, i: int) -> list[int]:
        token_ids = super()._block_token_ids(seq, i)
        for image, _ in images_in(seq, i * self.block_size, (i + 1) * self.block_size):
            token_ids = [*token_ids, *image.key]
        return token_ids

    def end_of_chunk(self, seq: Sequence, end: int) -> int:
        """End the chunk before its second new image, and leave room in the step's budget for the first one.

        A chunk that begins with a new image contains at least one token of it, even if the image exceeds the budget.
        """
        end = super().end_of_chunk(seq, end)
        if images := new_images(seq, end):
            (first, start), *others = images
            end = min([end - self.cost_of_image(first.num_tokens), *(placed.start for placed in others)])
            end = max(end, start, seq.num_computed_tokens + 1)
        return end

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self.forget_images()

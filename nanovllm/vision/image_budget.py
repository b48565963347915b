"""Limits the images that a step encodes, because the vision tower delays all sequences that decode in the step.

The cost of an image is a number of tokens of the step's budget. An image of cost n takes the vision tower about as many
operations as n tokens take the text model.
"""

from collections.abc import Callable

from nanovllm.engine.admission import TokenBudget
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models import ModelConfig
from nanovllm.vision.prompt_images import PromptImage, images_in


def cost_of_image(num_tokens: int, config: ModelConfig) -> int:
    """Return the cost of an image with `num_tokens` tokens, in tokens of the step's budget."""
    operations = config.layer_operations * config.num_hidden_layers
    return -(-config.vision.operations(num_tokens) // operations)


class ImageScheduler(Scheduler):
    """Replaces methods of an engine's scheduler."""

    cost_of_image: Callable[[PromptImage], int]  # 0 if the image's embeddings are stored

    def chunk_end(self, budget: TokenBudget, seq: Sequence, others_wait: bool) -> int:
        """Return the index where the chunk must end, so that the chunk and its images are within the budget.

        A chunk that begins with an image contains at least one token of the image, even if the image exceeds the
        budget.
        """
        start, end = seq.num_computed_tokens, super().chunk_end(budget, seq, others_wait)
        images = self._new_images(seq, end)
        while images and budget.cost(start, end) + (total := sum(images.values())) > budget.num_tokens:
            last = max(start, max(images))
            if (room := budget.num_tokens - total) >= 1:
                shorter = budget._replace(num_tokens=room).chunk_end(start, end, False)
                if shorter > last:
                    return shorter
            if last == start:
                return min(end, start + 1)
            end = last
            del images[last]
        return end

    def spend(self, budget: TokenBudget, seq: Sequence, end: int) -> TokenBudget:
        left = super().spend(budget, seq, end)
        return left._replace(num_tokens=left.num_tokens - sum(self._new_images(seq, end).values()))

    def _new_images(self, seq: Sequence, end: int) -> dict[int, int]:
        """Return the cost of each new image in the chunk up to `end`, by the index of the image's first token."""
        placed = images_in(seq, seq.num_computed_tokens, end)
        return {first: cost for image, first in placed if (cost := self.cost_of_image(image))}

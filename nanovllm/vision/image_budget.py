"""Limits how many images a step computes, because the sequences that decode in this step wait for the tower.

In the step's budget, an image costs the number of tokens for which the text model needs as many operations as the tower
needs for the image.
"""

from typing import Any

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_policy import TokenBudget
from nanovllm.engine.sequence import Sequence
from nanovllm.models import ModelConfig
from nanovllm.vision.prompt_images import PlacedImage, images_in


def cost_of_image(num_tokens: int, config: ModelConfig) -> int:
    """Return the cost of an image of `num_tokens` tokens, in tokens of a budget."""
    operations = config.layer_operations * config.num_hidden_layers
    return -(-config.vision.operations(num_tokens) // operations)


def new_images(seq: Sequence, end: int) -> list[PlacedImage]:
    """Return the images that the next chunk of `seq`, up to `end`, needs and earlier chunks did not need."""
    start = seq.num_computed_tokens
    is_first_chunk = start == seq.num_cached_tokens
    return [placed for placed in images_in(seq, start, end) if placed.start >= start or is_first_chunk]


class ImageScheduler(Scheduler):
    """Replaces a method of an engine's scheduler, whose block manager has the methods of ImageBlocks."""

    def spend(self, budget: TokenBudget, seq: Sequence, end: int) -> TokenBudget:
        blocks: Any = self.block_manager
        costs = (blocks.cost_of_image(image.num_tokens) for image, _ in new_images(seq, end))
        left = super().spend(budget, seq, end)
        return left._replace(num_tokens=left.num_tokens - sum(costs))

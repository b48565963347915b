"""Limits how many images a step computes, because the sequences that decode in this step wait for the tower.

In the step's budget, an image costs the number of tokens for which the text model needs as many operations as the tower
needs for the image.
"""

from collections.abc import Callable

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_policy import TokenBudget
from nanovllm.engine.sequence import Sequence
from nanovllm.models import ModelConfig
from nanovllm.vision.prompt_images import PlacedImage, PromptImage, images_in


def cost_of_image(num_tokens: int, config: ModelConfig) -> int:
    """Return the cost of an image of `num_tokens` tokens, in tokens of a budget."""
    operations = config.layer_operations * config.num_hidden_layers
    return -(-config.vision.operations(num_tokens) // operations)


class ImageScheduler(Scheduler):
    """Replaces methods of an engine's scheduler."""

    cost_of_image: Callable[[PromptImage], int]  # 0 if the image's embeddings are stored

    def chunk_end(self, budget: TokenBudget, seq: Sequence, others_wait: bool) -> int:
        """Return an end such that the chunk and its images are within the budget.

        A chunk that begins with an image contains at least one token of it, even if the image exceeds the budget.
        """
        start, end = seq.num_computed_tokens, super().chunk_end(budget, seq, others_wait)
        images, costs = self._new_images(seq, end)
        while images and budget.cost(start, end) + sum(costs) > budget.num_tokens:
            first_token = max(start, images[-1].start)
            if (room := budget.num_tokens - sum(costs)) >= 1:
                shorter = budget._replace(num_tokens=room).chunk_end(start, end, False)
                if shorter > first_token:
                    return shorter
            if first_token == start:
                return min(end, start + 1)
            end = first_token
            del images[-1], costs[-1]
        return end

    def spend(self, budget: TokenBudget, seq: Sequence, end: int) -> TokenBudget:
        left = super().spend(budget, seq, end)
        return left._replace(num_tokens=left.num_tokens - sum(self._new_images(seq, end)[1]))

    def _new_images(self, seq: Sequence, end: int) -> tuple[list[PlacedImage], list[int]]:
        """Return the images that must be computed for the chunk of `seq` up to `end`, and their costs."""
        placed = [(x, self.cost_of_image(x.image)) for x in images_in(seq, seq.num_computed_tokens, end)]
        return [x for x, cost in placed if cost], [cost for _, cost in placed if cost]

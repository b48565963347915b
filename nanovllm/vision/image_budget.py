"""Limits the images that a step encodes, because the vision tower delays all sequences that decode in the step.

The cost of an image is a number of tokens of the step's budget. The vision tower takes about as long for an image of
cost n as the text model takes for n tokens.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from nanovllm.engine.admission import TokenBudget
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models import ModelConfig
from nanovllm.vision.prompt_images import PromptImage, images_in

if TYPE_CHECKING:
    from nanovllm.vision.image_store import ImageStore


def cost_of_image(num_tokens: int, config: ModelConfig) -> int:
    """Return the cost of an image with `num_tokens` tokens, in tokens of the step's budget."""
    operations = config.layer_operations * config.num_hidden_layers
    return -(-config.vision.operations(num_tokens) // operations)


class ImageScheduler(Scheduler):
    """Replaces methods of an engine's scheduler.

    A mixed step leaves out a prompt if the prompt's next image does not fit into the step's budget. In the following
    mixed steps, the tower computes some blocks for this image, and other prompts get at most half of the budget. When
    all blocks are computed, the prompt continues. A step without decodes delays nobody, and encodes whole images.
    """

    images: "ImageStore"
    on_device: Callable[[], AbstractContextManager]
    cost_of_image: Callable[[PromptImage], int]

    _is_mixed = False  # whether the step that is scheduled delays decodes
    _left_out: tuple[Sequence, PromptImage] | None = None  # the first prompt that was left out, and its next image
    _waits_for_image = False  # whether `chunk_end` has left out the current prompt
    _num_used = 0.0  # tokens of the step's budget
    _num_saved = 0.0  # tokens of earlier budgets that are reserved for the next block of the tower

    def reset(self) -> None:
        super().reset()
        self._left_out, self._num_saved = None, 0

    def schedule_chunks(self, step: ScheduledStep, is_mixed: bool = False) -> None:
        self._forget_left_out()
        budget, image = self.mixed_budget, None
        if is_mixed and self._left_out is not None and self.images.part_left(self._left_out[1]):
            _, image = self._left_out
        self._is_mixed, self._num_used = is_mixed, 0
        if image is not None:
            self.mixed_budget = budget._replace(num_tokens=budget.num_tokens / 2)
        try:
            super().schedule_chunks(step, is_mixed)
        finally:
            self.mixed_budget = budget
        if image is not None:
            num_left = budget.num_tokens - step.num_decode_tokens - self._num_used
            self._compute_blocks(image, max(num_left, budget.num_tokens / 4))

    def _forget_left_out(self) -> None:
        """Forget the prompt that was left out, if the prompt has ended or was preempted, or if its image is encoded."""
        if self._left_out is not None:
            seq, image = self._left_out
            if seq.key not in self.prefilling or image.digest in self.images:
                self.images.forget(image)
                self._left_out, self._num_saved = None, 0

    def _compute_blocks(self, image: PromptImage, num_tokens: float) -> None:
        """Let the tower compute as many of its blocks as cost at most `num_tokens` tokens.

        If a single block costs more, save the tokens for a later step. Otherwise, drop the remaining tokens.
        """
        cost = self.cost_of_image(image) / self.images.num_blocks
        num_saved = self._num_saved if num_tokens < cost else 0
        num_blocks, self._num_saved = divmod(num_saved + num_tokens, cost)
        if num_blocks:
            with self.on_device():
                self.images.advance(image, int(num_blocks))

    def chunk_end(self, budget: TokenBudget, seq: Sequence, others_wait: bool) -> int:
        """Return the index where the chunk must end, so that the chunk and its images are within the budget.

        If the chunk begins with an image that exceeds the budget, the result is the begin of the chunk in a mixed step.
        In other steps, the chunk contains one token of the image.
        """
        start, end = seq.num_computed_tokens, super().chunk_end(budget, seq, others_wait)
        images, self._waits_for_image = self._new_images(seq, end), False
        while images and budget.cost(start, end) + (total := sum(images.values())) > budget.num_tokens:
            last = max(start, max(images))
            if (room := budget.num_tokens - total) >= 1:
                shorter = budget._replace(num_tokens=room).chunk_end(start, end, False)
                if shorter > last:
                    return shorter
            if last == start:
                if not self._is_mixed:
                    return min(end, start + 1)
                self._waits_for_image = True
                self._left_out = self._left_out or (seq, next(images_in(seq, start, start + 1)).image)
                return start
            end = last
            del images[last]
        return end

    def leave_out(self, seq: Sequence, started: deque[Sequence]) -> None:
        if not self._waits_for_image:
            super().leave_out(seq, started)

    def spend(self, budget: TokenBudget, seq: Sequence, end: int) -> TokenBudget:
        left = super().spend(budget, seq, end)
        left = left._replace(num_tokens=left.num_tokens - sum(self._new_images(seq, end).values()))
        self._num_used += budget.num_tokens - left.num_tokens
        return left

    def _new_images(self, seq: Sequence, end: int) -> dict[int, float]:
        """Return the cost of each new image in the chunk up to `end`, by the index of the image's first token."""
        placed = images_in(seq, seq.num_computed_tokens, end)
        return {
            first: part * self.cost_of_image(image) for image, first in placed if (part := self.images.part_left(image))
        }

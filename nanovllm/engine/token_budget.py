"""How many tokens of prompts a step computes."""

from math import inf, sqrt
from typing import NamedTuple

MIN_SHARED_CHUNK = 32  # tokens; less is not worth a chunk of its own


class TokenBudget(NamedTuple):
    """The bound of a step: so many first tokens of prompts, or fewer that attend to many tokens before them.

    A token that attends to `context_of_equal_cost` tokens counts twice, as attention costs it as much as all else.
    """

    num_tokens: float
    context_of_equal_cost: float = inf

    def beside(self, num_decodes: int, num_left: int) -> "TokenBudget":
        """What prompts get of this step if sequences decode in it too, and prompts have `num_left` tokens to compute.

        Short steps keep the gaps between two tokens short, and long ones shorten the queue. So a step has half of the
        bound as long as four such steps compute all prompts, and up to all of it if more wait. Prompts get at least a
        quarter of the bound, though many sequences decode.
        """
        num_tokens = min(self.num_tokens, max(self.num_tokens // 2, num_left // 4))
        return self._replace(num_tokens=max(1, num_tokens - num_decodes, self.num_tokens // 4))

    def cost(self, start: int, end: int) -> float:
        """Of a chunk with the tokens `start:end` of its sequence, in units of the budget."""
        return (end - start) * (1 + (start + end) / 2 / self.context_of_equal_cost)

    def without(self, start: int, end: int) -> "TokenBudget":
        """What a chunk leaves."""
        return self._replace(num_tokens=self.num_tokens - self.cost(start, end))

    def chunk_end(self, start: int, end: int, others_wait: bool) -> int:
        """Where a chunk of `start:end` ends: there if that is within the budget, but after at least one token.

        A longer one gets half of the budget if others wait, so that it does not keep short ones behind it waiting.
        """
        if self.cost(start, end) <= self.num_tokens:
            return end
        share = self.num_tokens / 2 if others_wait and self.num_tokens >= 2 * MIN_SHARED_CHUNK else self.num_tokens
        context = self.context_of_equal_cost
        slope = 1 + start / context
        # n tokens cost n * slope + n^2 / (2 * context)
        n = share if context == inf else context * (sqrt(slope**2 + 2 * share / context) - slope)
        return start + max(1, int(n))

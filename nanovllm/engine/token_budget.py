"""How many tokens of prompts a step computes."""

from math import inf, sqrt
from typing import NamedTuple

MIN_SHARED_CHUNK = 32  # tokens; less is not worth a chunk of its own


class TokenBudget(NamedTuple):
    """How many tokens of prompts a step may compute: `num_tokens` without a context, or fewer that follow a long one.

    A token that follows `context_of_equal_cost` others counts twice, as its attention costs as much as all else.
    """

    num_tokens: float
    context_of_equal_cost: float = inf

    def for_mixed_step(self, num_decodes: int, num_left: int) -> "TokenBudget":
        """The budget for prompts in a step in which `num_decodes` sequences decode. `num_left` tokens of prompts wait.

        Short steps keep the gaps between two tokens short, and long ones shorten the queue. So decodes and prompts have
        half of this budget as long as four such steps compute all prompts that wait, and up to all of it if there are
        more. Prompts get at least a quarter, however many sequences decode.
        """
        num_tokens = min(self.num_tokens, max(self.num_tokens // 2, num_left // 4))
        return self._replace(num_tokens=max(1, num_tokens - num_decodes, self.num_tokens // 4))

    def cost(self, start: int, end: int) -> float:
        """The cost of a chunk with the tokens `start:end` of its sequence, in units of `num_tokens`."""
        return (end - start) * (1 + (start + end) / 2 / self.context_of_equal_cost)

    def minus(self, start: int, end: int) -> "TokenBudget":
        """The budget that the chunk `start:end` leaves for others."""
        return self._replace(num_tokens=self.num_tokens - self.cost(start, end))

    def chunk_end(self, start: int, end: int, others_wait: bool) -> int:
        """The end of the next chunk of a prompt whose tokens `start:end` are left: `end` if all are within the budget.

        If not, the chunk gets the whole budget, or half of it if other prompts wait, so that short ones are computed
        beside a long one. It has at least one token.
        """
        if self.cost(start, end) <= self.num_tokens:
            return end
        share = self.num_tokens / 2 if others_wait and self.num_tokens >= 2 * MIN_SHARED_CHUNK else self.num_tokens
        context = self.context_of_equal_cost
        slope = 1 + start / context
        # n tokens cost n * slope + n^2 / (2 * context)
        n = share if context == inf else context * (sqrt(slope**2 + 2 * share / context) - slope)
        return start + max(1, int(n))

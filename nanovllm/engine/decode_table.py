"""The sequences that decode, as arrays: a step takes a few operations on them, however many sequences there are."""

import numpy as np

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence


class DecodeTable:
    """What each step reads or changes of the sequences that decode, by request index. Rows without a sequence are 0.

    numbers [rows, 7]: `Sequence.counts`; the tokens for which its blocks have slots; the order in which the sequences
        began to decode; the number of tokens from which on a token may end it, which is the last one, or any if it has
        stop ids; and `Sequence.is_watched`.
    """

    def __init__(self, max_num_seqs: int, block_size: int, tokens_per_row: int = 1):
        self.block_size, self.tokens_per_row = block_size, tokens_per_row
        self.seqs = np.full(max_num_seqs, None, object)
        self.numbers = np.zeros((max_num_seqs, 7), np.int64)
        self.num_tokens, self.num_computed_tokens, self.token_limits, *others = self.numbers.T
        self.capacities, self.serials, self.may_end_from, self.is_watched = others

    def add(self, seq: Sequence) -> None:
        i, may_end_from = seq.req_index, 0 if seq.params.stop_token_ids else seq.max_num_tokens
        capacity = len(seq.block_table) * self.block_size
        self.numbers[i] = *seq.counts, capacity, self.serials.max() + 1, may_end_from, seq.is_watched
        seq.counts = memoryview(self.numbers[i, :3])  # its items are Python's integers
        self.seqs[i] = seq

    def remove(self, seq: Sequence) -> None:
        if self.seqs[seq.req_index] is seq:
            seq.counts = seq.counts.tolist()
            self.seqs[seq.req_index] = None
            self.numbers[seq.req_index] = 0

    def ready(self) -> np.ndarray:
        """The request indices of the sequences with a token to decode.

        Attention to the longest starts first, so that the shorter ones fill the gaps at the end. Of equal ones, the one
        that has decoded for longer comes first.
        """
        rows = (self.num_tokens < self.token_limits).nonzero()[0]
        return rows[np.lexsort((self.serials[rows], -self.num_tokens[rows]))]

    def num_reserved(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens each of `rows` may get in a step."""
        return np.minimum(self.token_limits[rows] - self.num_tokens[rows], self.tokens_per_row)

    def without_slot(self, rows: np.ndarray) -> list[int]:
        """The indices of those `rows` that need another block for the tokens of a step."""
        return (self.capacities[rows] < self.num_tokens[rows] + self.num_reserved(rows) - 1).nonzero()[0].tolist()

    def schedule(self, rows: np.ndarray, step: ScheduledStep) -> None:
        """Decode tokens of each of `rows`, whose blocks have slots for them."""
        num_reserved = self.num_reserved(rows)
        num_tokens = self.num_tokens[rows] + num_reserved
        step.req_indices, step.num_reserved, step.context_lens = rows, num_reserved, num_tokens - 1
        step.sampled_seqs, step.sampled_rows = self.seqs[rows].tolist(), [*range(len(rows))]
        fills_block = num_tokens % self.block_size <= 1  # it can be cached when its last token arrives, or the next one
        may_change = fills_block | (num_tokens >= self.may_end_from[rows]) | (self.tokens_per_row > 1)
        step.visited = may_change.nonzero()[0].tolist()
        step.watched = self.is_watched[rows].nonzero()[0].tolist()
        self.num_computed_tokens[rows] = num_tokens - 1
        self.num_tokens[rows] = num_tokens

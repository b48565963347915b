"""The sequences that decode, as arrays: a step takes a few operations on them, however many sequences there are."""

import numpy as np

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence


class DecodeTable:
    """By request index: what each step reads or changes of the sequences that decode. Rows without a sequence are 0.

    numbers [rows, 7]: `Sequence.counts`; the tokens for which its blocks have slots; the order in which the sequences
        began to decode; the number of tokens from which on a token may end it, which is the last one, or any if it has
        stop ids; and `Sequence.is_watched`.
    block_tables [rows, W]: `Sequence.block_table`, and zeros after it.
    """

    def __init__(self, max_num_seqs: int, block_size: int):
        self.block_size = block_size
        self.seqs = np.full(max_num_seqs, None, object)
        self.numbers = np.zeros((max_num_seqs, 7), np.int64)
        self.num_tokens, self.num_computed_tokens, self.token_limits, *others = self.numbers.T
        self.capacities, self.serials, self.may_end_from, self.is_watched = others
        self.block_tables = np.zeros((max_num_seqs, 8), np.int32)

    def add(self, seq: Sequence) -> None:
        i, may_end_from = seq.req_index, 0 if seq.params.stop_token_ids else seq.max_num_tokens
        self.numbers[i] = *seq.counts, 0, self.serials.max() + 1, may_end_from, seq.is_watched
        seq.counts = memoryview(self.numbers[i, :3])  # its items are Python's integers
        self.seqs[i] = seq
        self.block_tables[i] = 0
        self.update_blocks(seq)

    def update_blocks(self, seq: Sequence) -> None:
        """Take over the block table of `seq`, which never gets shorter while it decodes."""
        n = len(seq.block_table)
        if n > self.block_tables.shape[1]:
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, n)))  # more than twice as wide
        self.block_tables[seq.req_index, :n] = seq.block_table
        self.capacities[seq.req_index] = n * self.block_size

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

    def without_slot(self, rows: np.ndarray) -> list[Sequence]:
        """The sequences of `rows` whose last token needs another block."""
        return self.seqs[rows[self.capacities[rows] < self.num_tokens[rows]]].tolist()

    def schedule(self, rows: np.ndarray, step: ScheduledStep) -> None:
        """Decode a token of each of `rows`, whose blocks have slots for it."""
        context_lens = self.num_tokens[rows]
        num_tokens = context_lens + 1
        step.req_indices, step.context_lens, step.block_tables = rows, context_lens, self.block_tables
        step.sampled_seqs, step.sampled_rows = self.seqs[rows].tolist(), [*range(len(rows))]
        fills_block = num_tokens % self.block_size <= 1  # it can be cached when its last token arrives, or the next one
        step.visited = (fills_block | (num_tokens >= self.may_end_from[rows])).nonzero()[0].tolist()
        step.watched = self.is_watched[rows].nonzero()[0].tolist()
        self.num_computed_tokens[rows] = context_lens
        self.num_tokens[rows] = num_tokens

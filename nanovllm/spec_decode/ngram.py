"""Prompt lookup: what followed the last few tokens when they occurred before in the same request.

Saxena, "Prompt lookup decoding" (2023).
"""

from nanovllm.engine.sequence import Sequence
from nanovllm.spec_decode.proposer import Proposer


class NGram(Proposer):
    """The longest n-gram that has occurred counts, and its last occurrence."""

    def __init__(self, settings):
        super().__init__(settings)
        # of each sequence: where its n-grams were continued last, and how many of its tokens are in there
        self.indices: dict[Sequence, tuple[dict[tuple[int, ...], int], int]] = {}

    def draft(self, seq, num_drafts):
        least, most = self.settings.prompt_lookup_min, self.settings.prompt_lookup_max
        tokens, (index, num_indexed) = seq.token_ids, self.indices.get(seq, ({}, least))
        for end in range(num_indexed, len(tokens)):  # the last n-grams are not among them
            for n in range(least, min(most, end) + 1):
                index[tuple(tokens[end - n : end])] = end
        self.indices[seq] = index, max(num_indexed, len(tokens))
        for n in range(min(most, len(tokens)), least - 1, -1):
            if (start := index.get(tuple(tokens[-n:]))) is not None:
                # past the end, what repeats goes on
                return [tokens[start + i % (len(tokens) - start)] for i in range(num_drafts)]
        return []

    def forget(self, seq):
        self.indices.pop(seq, None)

    def reset(self):
        self.indices.clear()

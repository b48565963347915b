"""Drafts by prompt lookup. Finds an earlier occurrence of a sequence's last tokens, and copies the next tokens.

Source: Saxena, "Prompt lookup decoding" (2023).
"""

from nanovllm.engine.sequence import Sequence
from nanovllm.spec_decode.proposer import Proposer


class NGram(Proposer):
    """Finds the longest n-gram at the end of a sequence that also occurs earlier in the sequence.

    The drafts are the tokens after the n-gram's latest earlier occurrence. If too few tokens follow the earlier
    occurrence, the drafts repeat these tokens.
    """

    def __init__(self, settings):
        super().__init__(settings)
        # by sequence: the position after the latest occurrence of each n-gram, and how many tokens are indexed
        self.indices: dict[Sequence, tuple[dict[tuple[int, ...], int], int]] = {}

    def draft(self, seq, num_drafts):
        min_n, max_n = self.settings.prompt_lookup_min, self.settings.prompt_lookup_max
        tokens, (index, num_indexed) = seq.token_ids, self.indices.get(seq, ({}, min_n))
        for end in range(num_indexed, len(tokens)):  # the n-grams at the very end are not indexed
            for n in range(min_n, min(max_n, end) + 1):
                index[tuple(tokens[end - n : end])] = end
        self.indices[seq] = index, max(num_indexed, len(tokens))
        for n in range(min(max_n, len(tokens)), min_n - 1, -1):
            if (start := index.get(tuple(tokens[-n:]))) is not None:
                # past the end of the sequence, the repetition continues
                return [tokens[start + i % (len(tokens) - start)] for i in range(num_drafts)]
        return []

    def forget(self, seq):
        self.indices.pop(seq, None)

    def reset(self):
        self.indices.clear()

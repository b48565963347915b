"""What the scheduler decides, the rows of one step, and what comes of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A row of a step, which computes the tokens `start:end` of `seq`."""

    seq: Sequence
    start: int
    end: int

    @classmethod
    def of(cls, seq: Sequence) -> "ScheduledSequence":
        """The last row that was scheduled of a sequence; of one that was never scheduled, all that is not cached."""
        if seq.num_scheduled_tokens:
            return cls(seq, seq.num_computed_tokens - seq.num_scheduled_tokens, seq.num_computed_tokens)
        return cls(seq, seq.num_cached_tokens, len(seq.token_ids))


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step: first the rows of sequences that decode one token, then chunks of prompts.

    Sequences only get several tokens with `speculative_config`: read `tokens_per_row` as 1 at first, here and
    elsewhere.

    decodes: the rows of the sequences that decode, with an upper bound of `end` where they have drafts.
    new_blocks: (index into `decodes`, column of its block table, block id) of the blocks that they have got.
    chunks: the rows that compute a prompt, or a part of one. A preempted sequence's generated tokens are among them.
    state_rows: the state that each chunk begins with, which layers without a state do not read; see cache/state.py.
    sampled_seqs: the sequences that get a token from this step, those that decode first.
    sampled_rows: the row from which each of them gets it, in ascending order; answers to one prompt share a row.
    feature_names: of the features with work on the host in this step.
    copies: (from, to) of cache blocks, and of states, that are copied before the step's keys and values are stored.
    tokens_per_row: the largest of `num_reserved`, or 1: a row is so wide, for a token and drafts of those after it.
    scheduled_at: when its scheduling began, in seconds of `time.perf_counter`.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[ScheduledSequence] = field(default_factory=list)
    state_rows: list[int] = field(default_factory=list)
    sampled_seqs: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    feature_names: set[str] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    tokens_per_row: int = 1
    scheduled_at: float = field(default_factory=perf_counter)

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def req_indices(self) -> list[int]:
        """Of the sequences that decode."""
        return [seq.req_index for seq, _, _ in self.decodes]

    @property
    def num_reserved(self) -> list[int]:
        """How many tokens each of them may get, at most `tokens_per_row`."""
        return [end - start for _, start, end in self.decodes]

    @property
    def watched(self) -> list[int]:
        """The indices of `sampled_seqs` whose every token a feature or a caller looks at."""
        return [i for i, seq in enumerate(self.sampled_seqs) if seq.is_watched]

    @property
    def chunk_lens(self) -> list[int]:
        return [end - start for _, start, end in self.chunks]

    @property
    def new_seqs(self) -> list[Sequence]:
        """The sequences that get their first token since they were admitted."""
        return self.sampled_seqs[self.num_decodes :]

    @property
    def rows(self) -> list[ScheduledSequence]:
        """All rows: those that decode, then the chunks."""
        return [*self.decodes, *self.chunks]

    def __iter__(self) -> Iterator[Any]:
        """`seqs, is_prefill = scheduler.schedule()`: the sequences, and whether tokens of prompts are computed."""
        yield [seq for seq, _, _ in self.rows]
        yield bool(self.chunks)

    @property
    def kind(self) -> str:
        """What is computed: "decode" (of running sequences alone), "prefill" (chunks of prompts alone) or "mixed"."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    def decode(self, rows: list[ScheduledSequence]) -> None:
        """These sequences decode. To be called before there are chunks."""
        self.decodes, self.sampled_rows = rows, [*range(len(rows))]
        self.sampled_seqs = [seq for seq, _, _ in rows]
        self.tokens_per_row = max((end - start for _, start, end in rows), default=1)

    def add_sampled(self, seq: Sequence) -> None:
        """`seq` gets a token from the last chunk so far."""
        self.sampled_seqs.append(seq)
        self.sampled_rows.append(self.num_decodes + len(self.chunks) - 1)


class StepResult(NamedTuple):
    """The outcome of a step on the host.

    token_ids: `tokens_per_row` for each of the step's `sampled_seqs`.
    feature_results: what features have computed, by their names.
    counts: how many of its tokens each sequence gets; the first, if there is only one.
    """

    token_ids: list[int]
    feature_results: dict[str, Any]
    counts: list[int] | None = None

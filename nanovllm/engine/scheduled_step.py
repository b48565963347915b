"""One step: the rows that the scheduler chose, and their result."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A row of a step: it computes the tokens `start:end` of `seq`."""

    seq: Sequence
    start: int
    end: int

    @classmethod
    def of(cls, seq: Sequence) -> "ScheduledSequence":
        """The last scheduled row of a sequence. If it was never scheduled: all tokens that are not cached."""
        if seq.num_scheduled_tokens:
            return cls(seq, seq.num_computed_tokens - seq.num_scheduled_tokens, seq.num_computed_tokens)
        return cls(seq, seq.num_cached_tokens, len(seq.token_ids))


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step: first the rows of sequences that decode one token, then chunks of prompts.

    `tokens_per_row` is 1 without `speculative_config`; read it as 1 at first, here and elsewhere.

    decodes: the rows of the sequences that decode. With drafts, `end` is an upper bound.
    new_blocks: (index into `decodes`, column in the block table, block id) of each block that these sequences got.
    chunks: the rows that compute a prompt or a part of it. After a preemption this includes generated tokens.
    state_rows: the state with which each chunk begins; only layers that keep a state read it: see cache/state.py.
    sampled_seqs: the sequences that get a token from this step, decodes first.
    sampled_rows: the row that each of them is sampled from, ascending; answers to one prompt share a row.
    feature_names: the features with work on the host in this step.
    copies: (from, to) of cache blocks and states, copied before the step stores keys and values.
    tokens_per_row: the largest of `num_reserved`, at least 1: the width of a decode row.
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
        """The request indices of the sequences that decode."""
        return [seq.req_index for seq, _, _ in self.decodes]

    @property
    def num_reserved(self) -> list[int]:
        """How many tokens each of these sequences may get, at most `tokens_per_row`."""
        return [end - start for _, start, end in self.decodes]

    @property
    def watched(self) -> list[int]:
        """The indices in `sampled_seqs` of the sequences that are watched."""
        return [i for i, seq in enumerate(self.sampled_seqs) if seq.is_watched]

    @property
    def chunk_lens(self) -> list[int]:
        return [end - start for _, start, end in self.chunks]

    @property
    def new_seqs(self) -> list[Sequence]:
        """The sequences that get their first token since admission."""
        return self.sampled_seqs[self.num_decodes :]

    @property
    def rows(self) -> list[ScheduledSequence]:
        """All rows: decodes, then chunks."""
        return [*self.decodes, *self.chunks]

    def __iter__(self) -> Iterator[Any]:
        """`seqs, is_prefill = scheduler.schedule()`: the sequences, and whether there are chunks of prompts."""
        yield [seq for seq, _, _ in self.rows]
        yield bool(self.chunks)

    @property
    def kind(self) -> str:
        """Either "decode" (no chunks), "prefill" (only chunks) or "mixed"."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    def decode(self, rows: list[ScheduledSequence]) -> None:
        """Set the rows that decode. To be called before chunks are added."""
        self.decodes, self.sampled_rows = rows, [*range(len(rows))]
        self.sampled_seqs = [seq for seq, _, _ in rows]
        self.tokens_per_row = max((end - start for _, start, end in rows), default=1)

    def add_sampled(self, seq: Sequence) -> None:
        """Sample a token of `seq` from the last chunk so far."""
        self.sampled_seqs.append(seq)
        self.sampled_rows.append(self.num_decodes + len(self.chunks) - 1)


class StepResult(NamedTuple):
    """The result of a step on the host.

    token_ids: `tokens_per_row` ids for each of the step's `sampled_seqs`.
    feature_results: what features have computed, by their names.
    counts: how many of these ids each sequence gets; None: each gets one.
    """

    token_ids: list[int]
    feature_results: dict[str, Any]
    counts: list[int] | None = None

"""A scheduled step and its result."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A row of a step: the tokens `start:end` of `seq`."""

    seq: Sequence
    start: int
    end: int

    @classmethod
    def of(cls, seq: Sequence) -> "ScheduledSequence":
        """Return the last scheduled row of `seq` or, if no row was scheduled, a row of all uncached tokens."""
        if seq.num_scheduled_tokens:
            return cls(seq, seq.num_computed_tokens - seq.num_scheduled_tokens, seq.num_computed_tokens)
        return cls(seq, seq.num_cached_tokens, len(seq.token_ids))


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A scheduled step, which consists of decode rows, followed by prefill chunks.

    A decode row contains one token or, with drafts, up to `tokens_per_row` tokens.

    decodes: the rows of the sequences that decode. If tokens are drafted, the `end` of a row is an upper bound.
    new_blocks: a triple (index into `decodes`, column in the block table, block id) for each block that a decode row
        gets.
    chunks: the rows that compute part or all of a prompt. After a preemption, chunks also recompute generated tokens.
    state_rows: for each chunk, the row of its initial state. Only layers with a state (cache/state.py) read the row of
        the initial state.
    sampled_seqs: the sequences that get a token from this step. Decoding sequences come first.
    sampled_rows: the row to sample from for each sequence in `sampled_seqs`. Row indices are in ascending order.
        Answers to one prompt share a row if they are admitted together.
    feature_names: the features that must do work on the host in this step.
    copies: a dict that maps the target of each copy to its source. Cache blocks and states are copied before the step
        stores keys and values.
    tokens_per_row: the number of tokens in the longest decode row. Without drafts, `tokens_per_row` is 1.
    scheduled_at: the value of `time.perf_counter` when scheduling began.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[ScheduledSequence] = field(default_factory=list)
    state_rows: list[int] = field(default_factory=list)
    sampled_seqs: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    feature_names: set[str] = field(default_factory=set)
    copies: dict[int, int] = field(default_factory=dict)
    tokens_per_row: int = 1
    scheduled_at: float = field(default_factory=perf_counter)

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.tokens_per_row

    @property
    def req_indices(self) -> list[int]:
        return [seq.req_index for seq, _, _ in self.decodes]

    @property
    def num_reserved(self) -> list[int]:
        """For each decode row, the maximum number of tokens that its sequence can get."""
        return [end - start for _, start, end in self.decodes]

    @property
    def watched(self) -> list[int]:
        return [i for i, seq in enumerate(self.sampled_seqs) if seq.is_watched]

    @property
    def chunk_lens(self) -> list[int]:
        return [end - start for _, start, end in self.chunks]

    @property
    def new_seqs(self) -> list[Sequence]:
        """The sequences for which this step samples the first token since their admission."""
        return self.sampled_seqs[self.num_decodes :]

    @property
    def prompt_seqs(self) -> list[Sequence]:
        """The sequences that have a chunk or are in `new_seqs`, without duplicates."""
        return [*dict.fromkeys([*(seq for seq, _, _ in self.chunks), *self.new_seqs])]

    @property
    def rows(self) -> list[ScheduledSequence]:
        return [*self.decodes, *self.chunks]

    def __iter__(self) -> Iterator[Any]:
        """Unpack the step as in `seqs, is_prefill = scheduler.schedule()`."""
        yield [seq for seq, _, _ in self.rows]
        yield bool(self.chunks)

    @property
    def kind(self) -> str:
        """The kind of step: "decode" (no chunks), "prefill" (only chunks) or "mixed"."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    def decode(self, rows: list[ScheduledSequence]) -> None:
        """Set the decode rows, before chunks are added."""
        self.decodes, self.sampled_rows = rows, [*range(len(rows))]
        self.sampled_seqs = [seq for seq, _, _ in rows]
        self.tokens_per_row = max((end - start for _, start, end in rows), default=1)

    def add_sampled(self, seq: Sequence) -> None:
        """Let the step sample a token for `seq` from the step's last chunk."""
        self.sampled_seqs.append(seq)
        self.sampled_rows.append(self.num_decodes + len(self.chunks) - 1)


class StepResult(NamedTuple):
    """The result of a step, after it was copied to the host.

    token_ids: `tokens_per_row` ids for each sequence in the step's `sampled_seqs`.
    feature_results: a dict that maps feature names to the features' results.
    counts: for each sequence, how many of the sequence's ids in `token_ids` are valid. If `counts` is None, each
        sequence has one valid id.
    """

    token_ids: list[int]
    feature_results: dict[str, Any]
    counts: list[int] | None = None

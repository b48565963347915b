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
    """A scheduled step: decode rows of one token (or, with drafts, several tokens), then chunks of prompts.

    sampled_rows: the row to sample from for each of `sampled_seqs`, in ascending order. Answers to one prompt share a
        row if they are admitted together.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)  # with drafts, each `end` is an upper bound
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (index in `decodes`, column, block id)
    chunks: list[ScheduledSequence] = field(
        default_factory=list
    )  # of prompts and, after a preemption, of generated tokens
    state_rows: list[int] = field(default_factory=list)  # of each chunk's initial state: see cache/state.py
    sampled_seqs: list[Sequence] = field(default_factory=list)  # those that get a token; decoding sequences first
    sampled_rows: list[int] = field(default_factory=list)
    feature_names: set[str] = field(default_factory=set)  # features with work on the host
    copies: dict[int, int] = field(default_factory=dict)  # target -> source block or state, copied before the step
    tokens_per_row: int = 1  # of the longest decode row
    scheduled_at: float = field(default_factory=perf_counter)  # when scheduling began

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
    """The result of a step on the host."""

    token_ids: list[int]  # `tokens_per_row` for each of `sampled_seqs`
    feature_results: dict[str, Any]  # by feature name
    counts: list[int] | None = None  # with drafts, how many of each sequence's ids are valid

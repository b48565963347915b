"""What the scheduler decides: the rows of one step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """The tokens `start:end` of `seq` are computed in this step."""

    seq: Sequence
    start: int
    end: int


@dataclass(slots=True)
class ScheduledStep:
    """One step: all prefill or all decode, and the sequences that get a token out of it, in the order of its rows.

    sampled_rows: the row from which each of `sampled_seqs` gets its token; answers to the same prompt share one.
    copies: (from, to) of cache blocks that are copied before the step's keys and values are stored.
    """

    is_prefill: bool
    rows: list[ScheduledSequence] = field(default_factory=list)
    sampled_seqs: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)

    def sample(self, seq: Sequence) -> None:
        """`seq` gets a token from the last row."""
        self.sampled_seqs.append(seq)
        self.sampled_rows.append(len(self.rows) - 1)

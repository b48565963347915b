"""What the scheduler decides: the rows of one step."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A row of a step, which computes the tokens `start:end` of `seq`."""

    seq: Sequence
    start: int
    end: int


@dataclass(slots=True)
class ScheduledStep:
    """One step: first the rows of sequences that decode one token, then chunks of prompts.

    num_decodes: how many rows decode.
    sampled_seqs: the sequences that get a token from this step.
    sampled_rows: the row from which each of them gets it, in ascending order; answers to one prompt share a row.
    constrained: those of `sampled_seqs` that have a constraint, and with it a mask of the tokens that may come next.
    copies: (from, to) of cache blocks that are copied before the step's keys and values are stored.
    scheduled_at: when its scheduling began, in seconds of `time.perf_counter`.
    """

    rows: list[ScheduledSequence] = field(default_factory=list)
    num_decodes: int = 0
    sampled_seqs: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    constrained: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    scheduled_at: float = field(default_factory=perf_counter, compare=False)

    @property
    def has_chunks(self) -> bool:
        return len(self.rows) > self.num_decodes

    @property
    def kind(self) -> str:
        """What is computed: "decode" (of running sequences alone), "prefill" (chunks of prompts alone) or "mixed"."""
        if not self.has_chunks:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def chunks(self) -> list[ScheduledSequence]:
        """The rows that compute a prompt, or a part of one. A preempted sequence's generated tokens are among them."""
        return self.rows[self.num_decodes :]

    def sample(self, seq: Sequence) -> None:
        """`seq` gets a token from the last row so far."""
        self.sampled_seqs.append(seq)
        self.sampled_rows.append(len(self.rows) - 1)

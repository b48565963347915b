"""Defines frames and `View`. A frame describes what a step has changed. A `View` is the state after a number of frames.

A frame is a JSON-serializable dict of differences from the previous frame. Empty fields are left out.

- `step`: the number of recorded steps.
- `time`: seconds since the recording began.
- `ms`: milliseconds that the step took. A frame without `ms` belongs to no step. A frame without a step contains the
  requests that were added or aborted since the previous step.
- `decodes`: names of the sequences that decode one token; left out if unchanged.
- `chunks`: [name, start, end] for each sequence that computes the prompt tokens `start:end`.
- `sampled`: names of the sequences that got a token, except for the sequences in `decodes`.
- `seqs`: for each new sequence, its name and four numbers of tokens after this step: [name, prompt, maximum, current,
  computed].
- `admitted`: names of the sequences that have begun to hold cache blocks.
- `released`: [name, reason] for each sequence that no longer holds blocks or is no longer shown. The reason is
  "preempted", "hidden" (far behind in the queue), or the finish reason.
- `waiting`: [number of waiting sequences, name of the first one, name of the second one, ...]; left out if unchanged.
- `tables`: [name, n, block id, ...] for each changed block table. The table keeps its first n entries, and continues
  with the listed block ids.
- `cached`: ids of blocks that the prefix cache can find, and that no sequence holds.
- `free`: ids of blocks that the prefix cache can no longer find, or that are in the block table of a layer with a
  window. A block that is in no table is either cached or free.
- `counts`: totals of prompt tokens, cached tokens, output tokens and preemptions; left out if unchanged.
- `windows`: the number of blocks that sequences hold in the block tables of layers with a window; left out if
  unchanged. `tables` does not list blocks of layers with a window.
- `tiers`: counts of the prefix cache's tiers outside the device; left out if unchanged, or if there are no such tiers.
  The counts are: used rows of host memory, blocks copied to host memory, blocks copied back, files of blocks, and
  blocks read from files. The first and fourth counts are current, and the other counts are totals.
- `ttft`: seconds to the first token, for each sequence whose first token this step sampled.
- `pooled`: seconds until the vector was complete, for each sequence whose vector this step computed. Only engines that
  return vectors have this entry.
- `key`: facts about the engine. A frame with `key` does not depend on earlier frames.

The name of a sequence is its request's id, such as "12", or "12.3" if the request has several answers. Neither text nor
token ids are recorded.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

Frame = dict[str, Any]


@dataclass(slots=True)
class SequenceView:
    """A sequence in a `View`.

    `tokens` is the number of prompt tokens and generated tokens, up to `max_tokens`.
    """

    prompt: int
    max_tokens: int
    tokens: int
    computed: int = 0  # the number of tokens whose keys and values are in the cache
    status: str = "waiting"  # or "running", "preempted"
    table: list[int] = field(default_factory=list)  # ids of its blocks


@dataclass(slots=True)
class View:
    """The state after a number of frames. The web page's script applies frames by the same rules as this class."""

    engine: dict[str, Any]
    step: int = 0
    time: float = 0.0
    seqs: dict[str, SequenceView] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=lambda: [0])
    decodes: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * 4)
    cached: set[int] = field(default_factory=set)
    windows: int = 0
    tiers: list[int] = field(default_factory=list)

    @classmethod
    def from_key_frame(cls, frame: Frame) -> "View":
        view = cls(frame["key"])
        view.apply(frame)
        return view

    def apply(self, frame: Frame) -> None:
        self.step, self.time = frame["step"], frame["time"]
        self.decodes = frame.get("decodes", self.decodes)
        self.waiting = frame.get("waiting", self.waiting)
        self.counts = frame.get("counts", self.counts)
        self.windows = frame.get("windows", self.windows)
        self.tiers = frame.get("tiers", self.tiers)
        if "ms" in frame:
            self._apply_rows(frame.get("chunks", ()), (*self.decodes, *frame.get("sampled", ())))
        for name, *numbers in frame.get("seqs", ()):
            self.seqs[name] = SequenceView(*numbers)
        for name in frame.get("admitted", ()):
            self.seqs[name].status = "running"
        for name, reason in frame.get("released", ()):
            if reason == "preempted":
                seq = self.seqs[name]
                seq.status, seq.computed, seq.table = reason, 0, []
            else:
                del self.seqs[name]
        for name, num_kept, *block_ids in frame.get("tables", ()):
            self.seqs[name].table[num_kept:] = block_ids
            self.cached.difference_update(block_ids)
        self.cached.update(frame.get("cached", ()))
        self.cached.difference_update(frame.get("free", ()))

    def _apply_rows(self, chunks: Iterable[tuple[str, int, int]], sampled: Iterable[str]) -> None:
        # an unknown sequence begins in this frame, or it ended while its token was in flight
        for name, _, end in chunks:
            if seq := self.seqs.get(name):
                seq.computed, seq.tokens = end, max(end, seq.tokens)
        for name in sampled:
            if seq := self.seqs.get(name):
                seq.computed = seq.tokens
                seq.tokens += 1

    def copy(self) -> "View":
        view = copy(self)
        view.seqs = {name: copy(seq) for name, seq in self.seqs.items()}
        for seq in view.seqs.values():
            seq.table = seq.table.copy()
        view.cached = self.cached.copy()
        return view

    def key_frame(self) -> Frame:
        seqs = self.seqs.items()
        return {
            "key": self.engine,
            "step": self.step,
            "time": self.time,
            "seqs": [[name, seq.prompt, seq.max_tokens, seq.tokens, seq.computed] for name, seq in seqs],
            "admitted": [name for name, seq in seqs if seq.status == "running"],
            "released": [[name, "preempted"] for name, seq in seqs if seq.status == "preempted"],
            "tables": [[name, 0, *seq.table] for name, seq in seqs if seq.table],
            "cached": sorted(self.cached),
            "waiting": self.waiting,
            "decodes": self.decodes,
            "counts": self.counts,
            "windows": self.windows,
            "tiers": self.tiers,
        }

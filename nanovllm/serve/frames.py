"""Frames, which tell viewers what each step has changed, and View, the state that the frames so far add up to.

A frame is a dict for JSON, and holds differences to the frame before. Fields that would be empty are left out:

- `step`: how many steps were recorded; `time`: seconds since the recording began; `ms`: what the step took. A frame
  without `ms` belongs to no step: it has the requests that were added or aborted since the last one.
- `decodes`: names of the rows that decode one token; left out if they are those of the frame before.
- `chunks`: [name, start, end] of the rows that compute the tokens `start:end` of a prompt.
- `sampled`: names of the sequences that got a token, those of `decodes` left out.
- `seqs`: [name, prompt tokens, upper bound of tokens, tokens, computed tokens] of sequences that were not shown before,
  after this step.
- `admitted`: names of the sequences that hold blocks from now on.
- `released`: [name, reason] of sequences that hold no blocks any more, or are no longer shown. The reason is
  "preempted", "hidden" (it waits behind many others), or the finish reason.
- `waiting`: [number of sequences, name of the first one, ...], in order; left out if it has not changed.
- `tables`: [name, n, block id, ...] of block tables that changed: n entries are the same, and these follow.
- `cached`: ids of blocks that no sequence holds any more, but that can be found as a prefix. `free`: ids of blocks that
  can no longer be found. A block that no table has is free, unless it is cached.
- `counts`: totals of prompt, cached and output tokens, and of preemptions; left out if they are the same.
- `ttft`: seconds to the first token, of sequences that got it.
- `key`: only in a key frame, which does not depend on the frames before it: facts about the engine.

A sequence is named after its request, "12", or "12.3" where a request has several answers. No text and no token ids
are recorded.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

Frame = dict[str, Any]


@dataclass(slots=True)
class SequenceView:
    """`tokens` counts those of the prompt and those that were generated, and `max_tokens` bounds it."""

    prompt: int
    max_tokens: int
    tokens: int
    computed: int = 0  # tokens whose keys and values are in the cache
    status: str = "waiting"  # or "running", "preempted"
    table: list[int] = field(default_factory=list)  # ids of its blocks


@dataclass(slots=True)
class View:
    """The sum of frames. The script of the page applies frames in the same way."""

    engine: dict[str, Any]
    step: int = 0
    time: float = 0.0
    seqs: dict[str, SequenceView] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=lambda: [0])
    decodes: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * 4)
    cached: set[int] = field(default_factory=set)

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
        # sequences that are not known begin in this frame, or ended while their token was in flight
        for name, _, end in chunks:
            if seq := self.seqs.get(name):
                seq.computed, seq.tokens = end, max(end, seq.tokens)
        for name in sampled:
            if seq := self.seqs.get(name):
                seq.computed = seq.tokens
                seq.tokens += 1

    def copy(self) -> "View":
        """A copy that does not change when this view does."""
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
        }

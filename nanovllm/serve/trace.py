"""Records the engine step by step. A page shows the recording, live or from a file.

```python
with trace(llm, "run.html"):
    llm.generate(prompts)
```
"""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from time import perf_counter

from nanovllm.engine.block_manager import Block
from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.sequence import Sequence
from nanovllm.llm import LLM
from nanovllm.serve.frames import Frame, View
from nanovllm.serve.page import render_page

MAX_WAITING = 32  # the most sequences of the queue that a frame shows
COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")  # keys of the scheduler's totals
TIERS = ("host_rows_used", "stored_blocks", "loaded_blocks", "disk_files", "disk_blocks")  # counts in a frame's `tiers`
KEPT_FIELDS = ("step", "time", "ms", "decodes", "windows")  # fields that frames have even if they are empty
logger = logging.getLogger("nanovllm")


@contextmanager
def trace(llm: LLM, path: str | Path, max_steps: int = 20_000) -> Iterator["StepRecorder"]:
    """Record the engine's steps during a `with` block. Write the steps to an HTML file, which works without a network.

    The file contains the last `max_steps` steps. The file is also written if the block raises an error. Raises
    FileNotFoundError if the folder of `path` does not exist.
    """
    if not (path := Path(path)).absolute().parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such folder")
    recorder = StepRecorder(llm, max_steps)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
        path.write_text(render_page(recorder.frames_since(0)[0]), encoding="utf-8")


class StepRecorder:
    """Makes a frame after each step, and stores the last `max_frames` frames.

    A frame stores how the engine's state differs from the previous frame. The time to make a frame depends on the
    numbers of running sequences and changed blocks, but not on the size of the cache. Any number of threads may read
    the frames. Dropped frames are merged into a key frame, where every reader starts.
    """

    def __init__(self, llm: LLM, max_frames: int = 512):
        self._engine_thread, self._core = llm.engine_thread, llm.core
        self._scheduler = llm.core.scheduler
        config = llm.config
        self._engine = {
            "model": Path(config.model).name,
            "task": self._scheduler.task,
            "device": config.device,
            "num_blocks": len(self._scheduler.block_manager.blocks),
            "block_size": config.kvcache_block_size,
            "block_tables": config.num_block_tables,
            "window": config.cache_window,
            "kv_cache_dtype": config.kv_cache_dtype,
            "swap_space": config.swap_space,
            "swap_dir": config.swap_dir is not None,
            "host_rows": self._scheduler.block_manager.tiers().get("host_rows", 0),
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "takes_images": config.model_config.vision is not None,
        }
        self._max_frames = max_frames
        self._frames: deque[Frame] = deque()
        self._first = 1
        self._lock = Lock()  # protects the frames
        self._encoded = (-1, -1, "")
        self._reset()

    def _reset(self) -> None:
        # the state at the last frame, which viewers know; a block table only grows while a sequence holds it
        self._tables: dict[Sequence, list[int]] = {}
        self._num_shown: dict[Sequence, int] = {}  # for each sequence, how many entries of its block table viewers know
        self._names: dict[Sequence, str] = {}
        self._cached: set[int] = set()  # free blocks whose contents the prefix cache can find
        self._outside: set[Sequence] = set()  # sequences that are shown, but hold no blocks
        self._just_released: set[Sequence] = set()  # sequences released since the last step
        self._hashes: object = None
        self._decodes: list[str] = []
        self._waiting: list = [0]
        self._counts: list[int] = []
        self._num_windows = 0  # blocks that window tables hold
        self._tiers: list[int] = []
        self._num_steps = 0
        self._began = perf_counter()
        self._last_end = 0.0  # the end of the last step, in seconds of `perf_counter`
        # frame numbers continue across recordings; `_base` is the state before frame `_first`
        self._base = View(self._engine)
        self._first += len(self._frames) + 1
        self._frames.clear()

    # -- what threads call ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording from the state after the current step."""
        self._engine_thread.call(self._start)

    def stop(self) -> None:
        """Stop recording. The frames can still be read."""
        self._engine_thread.call(self._stop)

    def refresh(self) -> None:
        """Add a frame if the state has changed without a step, for example because the last request was aborted."""
        self._engine_thread.call(self._refresh)

    @property
    def is_recording(self) -> bool:
        return self._on_step in self._core.on_step

    @property
    def is_idle(self) -> bool:
        """True if no sequence was waiting or running at the last frame."""
        return not self._tables and not self._waiting[0]

    def frames_since(self, last: int) -> tuple[list[Frame], int]:
        """Return the frames after frame number `last`. Also return the number of the last returned frame.

        If the frame after `last` was dropped, or if `last` is 0, return a key frame and all stored frames.
        """
        with self._lock:
            if last >= self._first - 1 and last > 0:
                return [*islice(self._frames, last + 1 - self._first, None)], self._first + len(self._frames) - 1
            base, frames = self._base.copy(), [*self._frames]
            last = self._first + len(frames) - 1
        return [base.key_frame(), *frames], last

    def json_since(self, last: int) -> tuple[str, int]:
        """Return the frames of `frames_since` as JSON, or "" if there are none. Also return the last frame's number.

        If several readers need the same frames, the frames are encoded only once.
        """
        begin, end, text = self._encoded
        if last != begin or end != self._first + len(self._frames) - 1:
            frames, end = self.frames_since(last)
            text = json.dumps(frames, separators=(",", ":")) if frames else ""
            self._encoded = (last, end, text)
        return text, end

    # -- what the engine's thread does ---------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Guard a `with` block. An error in the block ends the recording, but does not affect requests."""
        try:
            yield
        except Exception:
            logger.exception("the recording of steps has failed, and ends")
            if self.is_recording:
                self._core.on_step.remove(self._on_step)

    def _start(self) -> None:
        with self._guarded(), self._lock:
            if not self.is_recording:
                self._reset()
                self._base.apply(self._frame(None))
                self._core.on_step.append(self._on_step)

    def _stop(self) -> None:
        with self._guarded():
            if self.is_recording:
                self._core.on_step.remove(self._on_step)
                self._refresh()

    def _refresh(self) -> None:
        with self._guarded():
            frame = self._frame(None)
            if frame.keys() - {"step", "time"}:
                self._add(frame)

    def _on_step(self, step: ScheduledStep, result: StepResult) -> None:
        with self._guarded():
            self._add(self._frame(step))

    def _add(self, frame: Frame) -> None:
        with self._lock:
            self._frames.append(frame)
            if len(self._frames) > self._max_frames:
                self._base.apply(self._frames.popleft())
                self._first += 1

    def _frame(self, step: ScheduledStep | None) -> Frame:
        """Make the next frame."""
        end = perf_counter()
        self._num_steps += step is not None
        frame: Frame = {"step": self._num_steps, "time": round(end - self._began, 4)}
        frame |= {"admitted": [], "released": [], "tables": []}
        unused = self._update_tables(frame)
        self._update_waiting(frame)
        manager = self._scheduler.block_manager
        was_cleared = manager.hash_to_block_id is not self._hashes
        groups = manager.groups()
        if (num_windows := sum(group["used"] for group in groups[1:])) != self._num_windows:
            frame["windows"] = self._num_windows = num_windows
        if was_cleared or step is None or groups or self._has_missed(step):
            self._hashes = manager.hash_to_block_id
            self._update_cached(frame, manager.blocks)
        else:
            self._update_cached(frame, map(manager.blocks.__getitem__, unused))
        if step is not None:
            frame["ms"] = round(1e3 * (end - max(step.scheduled_at, self._last_end)), 3)
            self._last_end = end
            self._add_rows(frame, step)
            self._just_released.clear()
        counts = [*map(self._scheduler.totals.__getitem__, COUNTS), self._scheduler.num_preemptions]
        if counts != self._counts:
            frame["counts"] = self._counts = counts
        if (now := manager.tiers()) and (tiers := [now.get(name, 0) for name in TIERS]) != self._tiers:
            frame["tiers"] = self._tiers = tiers
        return {key: value for key, value in frame.items() if value or key in KEPT_FIELDS}

    def _update_tables(self, frame: Frame) -> set[int]:
        """Add changed block tables to the frame. Return the ids of blocks that sequences have released."""
        prefilling, running = self._scheduler.prefilling, self._scheduler.running
        unused: set[int] = set()
        for seq in chain(prefilling.values(), running.values()):
            table, known = seq.block_table, self._tables.get(seq)
            num_kept = self._num_shown[seq] if known is table else 0
            if num_kept == len(table):
                continue
            if known is None:
                frame["admitted"].append(self._name(seq, frame))
                self._outside.discard(seq)
            elif known is not table:  # the sequence was preempted and admitted again
                unused.update(known)
            frame["tables"].append([self._names[seq], num_kept, *table[num_kept:]])
            self._cached.difference_update(table[num_kept:])
            self._tables[seq] = table
            self._num_shown[seq] = len(table)
        if len(self._tables) > len(prefilling) + len(running):
            holding = {*prefilling.values(), *running.values()}
            for seq in [seq for seq in self._tables if seq not in holding]:
                unused.update(self._release(seq, frame))
        return unused

    def _release(self, seq: Sequence, frame: Frame) -> list[int]:
        """Add a released sequence to the frame. Return the ids of the blocks that the sequence used.

        A released sequence gets a new table, so the recorded table still contains the ids.
        """
        frame["released"].append([self._names[seq], seq.finish_reason or "preempted"])
        if seq.is_finished:
            del self._names[seq]
        else:
            self._outside.add(seq)
        self._just_released.add(seq)
        del self._num_shown[seq]
        return self._tables.pop(seq)

    def _update_cached(self, frame: Frame, blocks: Iterable[Block]) -> None:
        """Add unused blocks to the frame if they have become cached or are no longer cached."""
        cached = self._cached
        changed = [b.block_id for b in blocks if (not b.ref_count and b.hash != -1) != (b.block_id in cached)]
        frame["cached"] = sorted(block_id for block_id in changed if block_id not in cached)
        frame["free"] = sorted(block_id for block_id in changed if block_id in cached)
        cached.symmetric_difference_update(changed)

    def _update_waiting(self, frame: Frame) -> None:
        shown = [*islice(self._scheduler.waiting, MAX_WAITING)]
        waiting = [len(self._scheduler.waiting), *(self._name(seq, frame) for seq in shown)]
        if waiting != self._waiting:
            frame["waiting"] = self._waiting = waiting
        self._outside.update(shown)
        for seq in self._outside.difference(shown):
            # a paused beam waits outside the queue; an error drops sequences before they finish
            is_paused = seq.is_paused and not seq.is_finished and seq.request_id in self._scheduler.live
            if not is_paused:
                self._outside.remove(seq)
                frame["released"].append([self._names.pop(seq), seq.finish_reason or "hidden"])

    def _name(self, seq: Sequence, frame: Frame) -> str:
        """Return the name of a sequence."""
        if (name := self._names.get(seq)) is None:
            name = self._names[seq] = sequence_name(seq)
            num_tokens = len(seq.token_ids)
            num_computed = min(seq.num_computed_tokens, num_tokens)  # may already include tokens in flight
            numbers = seq.num_prompt_tokens, seq.max_num_tokens, num_tokens, num_computed
            frame.setdefault("seqs", []).append([name, *numbers])
        return name

    def _has_missed(self, step: ScheduledStep) -> bool:
        """Return True if a sequence has started and ended between two frames.

        The recorder does not know which blocks a missed sequence may have evicted.
        """
        seqs = chain((seq for seq, _, _ in step.chunks), step.sampled_seqs[step.num_decodes :])
        return any(seq not in self._tables and seq not in self._just_released for seq in seqs)

    def _add_rows(self, frame: Frame, step: ScheduledStep) -> None:
        # a row may belong to a sequence that ended while its token was in flight
        decodes = [self._names.get(seq) or sequence_name(seq) for seq, _, _ in step.decodes]
        if decodes != self._decodes:
            frame["decodes"] = self._decodes = decodes
        frame["chunks"] = [[sequence_name(seq), start, end] for seq, start, end in step.chunks]
        if self._scheduler.task != "generate":  # no sequence gets a token
            frame["pooled"] = [round(seq.timing["finished"], 4) for seq in step.new_seqs if seq.finish_reason == "stop"]
            return
        sampled = [seq for seq in step.new_seqs if seq.has_sampled]
        frame["sampled"] = [sequence_name(seq) for seq in sampled]
        frame["ttft"] = [round(seq.timing["first_token"], 4) for seq in sampled if seq.num_completion_tokens == 1]


def sequence_name(seq: Sequence) -> str:
    """Return the id of the request, such as "12", or "12.3" if the request has several answers."""
    is_only_one = len(seq.group) == 1 and not seq.pauses_after_token
    return str(seq.request_id) if is_only_one else f"{seq.request_id}.{seq.index}"

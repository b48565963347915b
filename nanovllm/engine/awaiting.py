"""Holds sequences while another thread works for a feature, for example on a mask for structured outputs.

The functions in this module extend the Scheduler. A held sequence is paused, and may be preempted.
"""

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

MAX_WAIT_SECONDS = 0.02  # short, because callers' commands wait meanwhile


def hold(scheduler: "Scheduler", seq: Sequence) -> None:
    """Hold a sequence after its last step. The sequence may be running or waiting.

    `resume_done` ends the hold when the Future in `seq.awaited` is done.
    """
    seq.is_paused, scheduler.held[seq] = True, None
    scheduler.waiting.discard(seq)  # if it was preempted while the step was in flight


def resume_done(scheduler: "Scheduler") -> list[Sequence]:
    """Resume or end the held sequences whose `awaited` Future is done. Return the ended sequences."""
    ended = []
    for seq in [seq for seq in scheduler.held if seq.awaited.done()]:
        del scheduler.held[seq]
        reasons = outcome(seq.awaited)
        seq.awaited, seq.is_paused = None, False
        if reasons is not None:
            scheduler.finish(seq, *reasons)
            ended.append(seq)
            continue
        seq.limit_tokens()
        if seq.status is SequenceStatus.WAITING:
            scheduler.waiting.push(seq)
    return ended


def outcome(future: Any) -> tuple[str, int | str | None] | None:
    """Return (finish reason, stop reason) if the sequence that awaits `future` must end, or None if it continues.

    An error in `future` ends only this sequence.
    """
    if future.cancelled():
        return "abort", None
    if (error := future.exception()) is not None:
        return "error", f"{type(error).__name__}: {error}"
    return future.result()


def wait_for_one(scheduler: "Scheduler") -> None:
    """If no step can be scheduled, wait briefly until a held sequence can continue."""
    wait([seq.awaited for seq in scheduler.held], MAX_WAIT_SECONDS, FIRST_COMPLETED)

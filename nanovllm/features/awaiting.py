"""Sequences that await what a feature does in other threads, such as a mask of structured outputs.

These functions are the Scheduler's own. A held sequence is paused, as beams are: it may lose its blocks.
"""

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

MAX_WAIT_SECONDS = 0.02  # for a held sequence: meanwhile, callers may want something


def hold(scheduler: "Scheduler", seq: Sequence) -> None:
    """Schedule no step of a sequence that has got its last token, whatever its status, until `release`."""
    seq.is_paused, scheduler.held[seq] = True, None
    scheduler.waiting.discard(seq)  # if it was preempted while the step was in flight


def release(scheduler: "Scheduler") -> list[Sequence]:
    """Let held sequences go on, or end them, if what they await is done. If all are held, wait for one of them.

    Returns those that have ended.
    """
    are_all = len(scheduler.held) == sum(map(len, scheduler.live.values()))
    seconds = MAX_WAIT_SECONDS if are_all else 0
    done, _ = wait([seq.awaited for seq in scheduler.held], seconds, FIRST_COMPLETED)
    ended = []
    for seq in [seq for seq in scheduler.held if seq.awaited in done]:
        del scheduler.held[seq]
        reasons = seq.awaited.result()
        seq.awaited, seq.is_paused = None, False
        if reasons is not None:
            scheduler.finish(seq, *reasons)
            ended.append(seq)
            continue
        seq.limit_tokens()
        if seq.status is SequenceStatus.WAITING:
            scheduler.waiting.push(seq)
    return ended

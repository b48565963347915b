"""Sequences that await what a feature does in other threads, such as a mask of structured outputs.

These functions are the OutputProcessor's own. A held sequence is paused, as beams are: it may lose its blocks.
"""

from concurrent.futures import FIRST_COMPLETED, wait

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def hold(scheduler: Scheduler, awaiting: dict[Sequence, None], seq: Sequence) -> None:
    """Schedule no step of a sequence that has got its last token, whatever its status, until `release`."""
    seq.is_paused, awaiting[seq] = True, None
    scheduler.waiting.discard(seq)  # if it was preempted while the step was in flight


def release(
    scheduler: Scheduler, awaiting: dict[Sequence, None], seconds: float
) -> dict[Sequence, tuple[str, int | str | None]]:
    """Remove those of `awaiting` that need not wait any more, and let them go on. If there are none, wait so long.

    Returns finish reasons and stop reasons of those that are to end instead.
    """
    done, _ = wait([seq.awaited for seq in awaiting], seconds, FIRST_COMPLETED)
    ends = {}
    for seq in [seq for seq in awaiting if seq.awaited in done]:
        del awaiting[seq]
        reasons = seq.awaited.result()
        seq.awaited, seq.is_paused = None, False
        if reasons is not None:
            ends[seq] = reasons
            continue
        seq.limit_tokens()
        if seq.status is SequenceStatus.WAITING:
            scheduler.waiting.push(seq)
    return ends

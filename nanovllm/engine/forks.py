"""Sequences that share a prefix: the answers to one prompt (`n` > 1), and beams, which pause after each token.

These functions are the Scheduler's own, in a file apart because most requests have one answer. Like its methods they
change sequences, and are called between two steps.
"""

from copy import copy, deepcopy
from typing import TYPE_CHECKING

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


def start_others(scheduler: "Scheduler", seq: Sequence, step: ScheduledStep) -> None:
    """Start the other answers to the prompt of `seq`, as far as they fit: they get a token from the same row."""
    num_spare = len(scheduler.running) - 1  # a block for each of the others, as in `Scheduler._admit`
    for other in seq.group:
        if other.status is not SequenceStatus.WAITING or other.has_sampled:
            continue
        if not scheduler.free_req_indices or len(scheduler.block_manager.free_block_ids) <= num_spare:
            break
        scheduler.waiting.discard(other)
        scheduler.set_running(other)
        scheduler.block_manager.fork(seq, other)
        scheduler.start_decoding(other, step)


def hold(scheduler: "Scheduler", seq: Sequence) -> None:
    """A token of a sequence that pauses after each has arrived: it waits for `resume`, and may be forked first."""
    seq.is_paused, seq.num_tokens = True, len(seq.token_ids)
    scheduler.waiting.discard(seq)  # if it was preempted while the step was in flight


def fork(scheduler: "Scheduler", seq: Sequence, index: int, token_id: int) -> Sequence:
    """Another answer to the request of a paused sequence, which goes on with `token_id`.

    It shares the blocks of `seq` if there are enough, and is recomputed if not.
    """
    other = _copy(seq, index, token_id)
    scheduler.live[seq.request_id][index] = other
    if seq.block_table and scheduler.free_req_indices and scheduler.block_manager.free_block_ids:
        scheduler.set_running(other)
        scheduler.block_manager.fork(seq, other)
        scheduler.prefilling[other.key] = other
    else:
        scheduler.waiting.push(other)
    return other


def resume(scheduler: "Scheduler", seq: Sequence, token_id: int) -> None:
    """Let a paused sequence go on with `token_id`, in the next step."""
    seq.append_token(token_id)
    seq.num_tokens, seq.is_paused = len(seq.token_ids), False
    if seq.block_table and scheduler.block_manager.can_append(seq):
        scheduler.block_manager.may_append(seq)
        del scheduler.running[seq.key]
        scheduler.prefilling[seq.key] = seq
        return
    if seq.block_table:
        scheduler.release(seq)
        seq.status = SequenceStatus.WAITING
    scheduler.waiting.push(seq)


def preempt_paused(scheduler: "Scheduler", step: ScheduledStep) -> None:
    """Nothing fits into the step: beams that pause give up their blocks, which others of their requests may need."""
    paused = [seq for seq in scheduler.running.values() if seq.is_paused and seq not in scheduler.held]
    while paused and scheduler.waiting and not step.chunks:
        scheduler.preempt(paused.pop())
        scheduler.schedule_chunks(step)


def _copy(seq: Sequence, index: int, token_id: int) -> Sequence:
    """Another answer to the same request, with the tokens of `seq` and `token_id`; it has no blocks yet."""
    other = copy(seq)
    other.index, other.token_ids = index, [*seq.token_ids, token_id]
    other.set_order(seq.order[0])
    other.num_tokens, other.num_computed_tokens = len(other.token_ids), 0
    other.token_limit, other.num_drafts = seq.max_num_tokens, 0
    other.block_table, other.block_hashes, other.req_index = [], [], -1
    other.status, other.is_paused, other.was_admitted = SequenceStatus.WAITING, False, False
    other.feature_state, other.timing = deepcopy(seq.feature_state), dict(seq.timing)
    return other

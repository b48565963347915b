"""Functions that fork sequences, for several answers to one prompt (`n` > 1) and for beam search.

The functions in this module extend the Scheduler, but most requests do not need them. The sequences of a beam search
(beams) pause after each token.
"""

from copy import copy, deepcopy
from typing import TYPE_CHECKING

from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


def num_later_answers(scheduler: "Scheduler", seq: Sequence) -> int:
    """Return how many later answers must fit, besides `seq`, when `seq` is admitted.

    For the first answer of a new group, return the number of the group's other answers. If nothing runs, return 0, so
    that the first answer is admitted even if the other answers do not fit.
    """
    is_new_group = seq is seq.group[0] and not seq.has_sampled
    return len(seq.group) - 1 if is_new_group and scheduler.num_running else 0


def start_others(scheduler: "Scheduler", seq: Sequence, step: ScheduledStep) -> None:
    """Start as many of the prompt's other answers as fit, and sample their first tokens from the row of `seq`."""
    if seq.num_completion_tokens:
        return  # the row computes tokens again after a preemption, and samples a later token
    num_spare = len(scheduler.running) - 1  # a block for each other sequence, as in `Scheduler._admit`
    for other in seq.group:
        if other.status is not SequenceStatus.WAITING or other.has_sampled:
            continue
        if not scheduler.free_req_indices or scheduler.block_manager.num_free <= num_spare:
            break
        scheduler.waiting.discard(other)
        scheduler.set_running(other)
        scheduler.block_manager.fork(seq, other)
        scheduler.start_decoding(other, step)


def pause(scheduler: "Scheduler", seq: Sequence) -> None:
    """Pause a sequence whose token has arrived. The sequence may be forked until `resume` is called."""
    seq.is_paused, seq.num_tokens = True, len(seq.token_ids)
    scheduler.waiting.discard(seq)  # if it was preempted while the step was in flight


def fork(scheduler: "Scheduler", seq: Sequence, index: int, token_id: int) -> Sequence:
    """Return a new answer: the tokens of the paused sequence `seq`, followed by `token_id`.

    The answer shares the blocks of `seq` if a request index and a block are free. If no index or block is free, the
    answer's tokens are recomputed.
    """
    new_seq = _copy(seq, index, token_id)
    scheduler.live[seq.request_id][index] = new_seq
    if seq.block_table and scheduler.free_req_indices and scheduler.block_manager.num_free:
        scheduler.set_running(new_seq)
        scheduler.block_manager.fork(seq, new_seq)
        scheduler.prefilling[new_seq.key] = new_seq
    else:
        scheduler.waiting.push(new_seq)
    return new_seq


def resume(scheduler: "Scheduler", seq: Sequence, token_id: int) -> None:
    seq.append_token(token_id)
    seq.num_tokens, seq.is_paused = len(seq.token_ids), False
    if seq.block_table:
        blocks = scheduler.block_manager
        blocks.prepare_decodes([ScheduledSequence(seq, seq.num_tokens - 1, seq.num_tokens)])
        if blocks.can_append(seq):
            blocks.may_append(seq)
            del scheduler.running[seq.key]
            scheduler.prefilling[seq.key] = seq
            return
        scheduler.release(seq)
        seq.status = SequenceStatus.WAITING
    scheduler.waiting.push(seq)


def preempt_paused(scheduler: "Scheduler", step: ScheduledStep) -> None:
    """If the step is empty, preempt paused beams until a waiting sequence fits.

    The waiting sequence may itself be a beam.
    """
    paused = [seq for seq in scheduler.running.values() if seq.is_paused and seq not in scheduler.held]
    while paused and scheduler.waiting and not step.chunks:
        scheduler.preempt(paused.pop())
        scheduler.schedule_chunks(step)


def _copy(seq: Sequence, index: int, token_id: int) -> Sequence:
    new_seq = copy(seq)
    new_seq.index, new_seq.token_ids = index, [*seq.token_ids, token_id]
    new_seq.set_order(seq.order[0])
    new_seq.num_tokens, new_seq.num_computed_tokens = len(new_seq.token_ids), 0
    new_seq.block_table, new_seq.window_columns, new_seq.block_hashes, new_seq.req_index = [], [], [], -1
    new_seq.status, new_seq.is_paused, new_seq.was_admitted = SequenceStatus.WAITING, False, False
    new_seq.feature_state, new_seq.timing = deepcopy(seq.feature_state), dict(seq.timing)
    return new_seq

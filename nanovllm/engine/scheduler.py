"""Who runs in the next step, and in which blocks."""
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


MOST_HELD = 32


class ScheduledSequence(NamedTuple):
    """The tokens `start:end` of `seq` are computed in this step."""

    seq: Sequence
    start: int
    end: int


@dataclass(slots=True)
class ScheduledStep:
    """One step: all prefill or all decode, and the sequences that get a token out of it, in the same order."""

    is_prefill: bool
    rows: list[ScheduledSequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)


class Scheduler:
    """Continuous batching: prefill first while requests wait and fit, else one token for all that run.

    Once full, new ones come in groups: when a sixteenth of those that ran has ended, or after MOST_HELD steps.

    `schedule` may be called again before the last step's tokens have reached `postprocess`, but only once: a
    sequence preempted in between has its tokens complete again before it can be admitted.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, eos_token_ids: frozenset[int]
    ):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Sequence] = deque()  # its head may be RUNNING: admitted, its prompt computed in part
        self.running: dict[int, Sequence] = {}  # by request id, in order of admission
        self.refill_at = max_num_seqs  # new ones are admitted when no more than so many run
        self.num_held = 0  # steps without admission since it was full
        self.free_req_indices = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where all that runs waits only for tokens that are still on their way."""
        step = self._schedule_prefill()
        if not step.rows:
            step = self._schedule_decode()
        return step if step.rows else None

    def _schedule_prefill(self) -> ScheduledStep:
        step = ScheduledStep(is_prefill=True)
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.status is SequenceStatus.WAITING and not self._admit(seq):
                break
            start = seq.num_computed_tokens
            end = min(start + budget, seq.num_tokens)
            budget -= end - start
            step.rows.append(ScheduledSequence(seq, start, end))
            seq.num_computed_tokens = end
            self.block_manager.publish(seq)
            if end == seq.num_tokens:
                self.waiting.popleft()
                self.running[seq.request_id] = seq
                step.sampled.append(seq)
                seq.num_tokens += 1
        return step

    def _admit(self, seq: Sequence) -> bool:
        num_running = len(self.running)
        if num_running > self.refill_at and self.num_held < MOST_HELD:
            self.num_held += 1
            return False
        self.num_held = 0
        # One block for each that runs: all can grow once before any has to make room for another.
        if num_running >= self.max_num_seqs or not self.block_manager.can_allocate(seq, num_running):
            # Full. A prefill step for every sequence that ends would hold up all others: wait for a sixteenth of them.
            self.refill_at = max(0, num_running - max(1, num_running // 16))
            return False
        self.refill_at = self.max_num_seqs
        assert len(seq.token_ids) == seq.num_tokens, "admitted with a token in flight"
        self.block_manager.allocate(seq)
        if seq.num_tokens == seq.num_prompt_tokens:  # not one that was preempted
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.req_index = self.free_req_indices.pop()
        seq.status = SequenceStatus.RUNNING
        return True

    def _schedule_decode(self) -> ScheduledStep:
        step = ScheduledStep(is_prefill=False)
        for seq in list(self.running.values()):
            if seq.status is not SequenceStatus.RUNNING or seq.num_tokens >= seq.max_num_tokens:
                continue  # made room for an earlier one, or its last token is in flight
            while not self.block_manager.can_append(seq):
                last = next(reversed(self.running.values()))
                self.preempt(last)
                if last is seq:
                    break
            else:
                self.block_manager.may_append(seq)
                step.rows.append(ScheduledSequence(seq, seq.num_tokens - 1, seq.num_tokens))
                seq.num_computed_tokens = seq.num_tokens
                seq.num_tokens += 1
        # the longest first: attention over them begins first, and that over the shorter ones fills the gaps at the end
        step.rows.sort(key=lambda row: row.end, reverse=True)
        step.sampled = [row.seq for row in step.rows]
        return step

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the head of the queue, to be computed again from what it has."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def postprocess(self, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
        """Take in the tokens of a step; the sequences that ended with them."""
        finished = []
        for seq, token_id in zip(step.sampled, token_ids, strict=True):
            if seq.status is SequenceStatus.FINISHED:
                continue  # ended while this token was in flight: it is not part of the answer
            seq.token_ids.append(token_id)
            self.block_manager.publish(seq)
            if token_id in self.eos_token_ids and not seq.params.ignore_eos:
                self._finish(seq, "stop")
            elif len(seq.token_ids) == seq.max_num_tokens:
                self._finish(seq, "length")
            else:
                continue
            finished.append(seq)
        return finished

    def abort_all(self) -> None:
        """Drop every request and all that the cache knows, for when a step did not come to its end."""
        for seq in [*self.waiting, *self.running.values()]:
            self._finish(seq, "abort")
        self.block_manager.forget_prefixes()

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.request_id not in self.running:
            self.waiting.remove(seq)
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.free_req_indices.append(seq.req_index)
        seq.req_index = -1
        self.running.pop(seq.request_id, None)

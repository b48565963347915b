"""Who runs in the next step, and in which blocks."""

from collections import Counter, OrderedDict
from itertools import takewhile
from operator import attrgetter

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence, SequenceStatus

MAX_HELD_STEPS = 32  # steps without admission once full


class Scheduler:
    """Continuous batching: prefill first while requests wait and fit, else one token for all that run.

    Once full, new ones come in groups: when a sixteenth of those that ran has ended, or after MAX_HELD_STEPS steps.

    `schedule` may be called again before the last step's tokens have reached `postprocess`, but only once: a
    sequence preempted in between has its tokens complete again before it can be admitted.

    The answers to one prompt (`Sequence.group`) wait in a row. The first is admitted when there is room for all, or
    nothing else runs; once its prompt is computed, those behind it share its blocks and are sampled in the same step, as
    far as they fit. The rest stay at the head of the queue, as requests that find their prompt in the prefix cache.

    Sequences are kept by (request id, index), so that one can leave from anywhere in O(1).
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, eos_token_ids: frozenset[int]
    ):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.eos_token_id: int | None = None  # the tokenizer's own, which needs no stop reason
        self.live: dict[int, dict[int, Sequence]] = {}  # by request id and index: all that have not ended
        # those at the head may be RUNNING: admitted, and computed in part
        self.waiting: OrderedDict[tuple[int, int], Sequence] = OrderedDict()
        self.running: dict[tuple[int, int], Sequence] = {}  # in order of admission
        self.refill_at = max_num_seqs  # new ones are admitted when no more than so many run
        self.num_held = 0  # steps without admission since it was full
        self.free_req_indices = list(range(max_num_seqs - 1, -1, -1))
        self.is_decode_due = False  # before the next prefill
        self.num_preemptions = 0
        self.counts: Counter[str] = Counter()

    def add(self, *group: Sequence) -> None:
        """Queue the answers to one prompt."""
        for seq in group:
            self.live.setdefault(seq.request_id, {})[seq.index] = seq
            self.waiting[seq.request_id, seq.index] = seq

    def is_finished(self) -> bool:
        return not self.live

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where all that runs waits only for tokens that are still on their way."""
        copies, self.block_manager.copies = (
            self.block_manager.copies,
            {},
        )  # those of this step's forks are the next one's
        first, second = self._schedule_prefill, self._schedule_decode
        step = second() if self.is_decode_due else first()
        if not step.rows:
            step = first() if self.is_decode_due else second()
        while not step.rows and self.waiting and (paused := [s for s in self.running.values() if s.is_paused]):
            self.preempt(paused[-1])  # beams that wait for others of their search, which find no blocks
            step = self._schedule_prefill()
        if not step.rows:
            self.block_manager.copies = copies
            return None
        # beams are all prefill: others decode in between
        self.is_decode_due = step.is_prefill and all(row.seq.pauses for row in step.rows)
        step.copies = [(source, target) for target, source in copies.items()]
        self.counts["prefill_steps" if step.is_prefill else "decode_steps"] += 1
        return step

    def _schedule_prefill(self) -> ScheduledStep:
        step = ScheduledStep(is_prefill=True)
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = next(iter(self.waiting.values()))
            if seq.status is SequenceStatus.WAITING and not self._admit(seq):
                break
            start = seq.num_computed_tokens
            end = min(start + budget, seq.num_tokens)
            budget -= end - start
            step.rows.append(ScheduledSequence(seq, start, end))
            seq.num_computed_tokens = end
            self.block_manager.publish(seq)
            if end == seq.num_tokens:
                self.waiting.popitem(last=False)
                num_running, is_first = len(self.running), not seq.has_begun
                self._start(seq, step)
                if is_first and seq.params.n > 1:
                    self._fork(seq, step, num_running)
        return step

    def _start(self, seq: Sequence, step: ScheduledStep) -> None:
        """Its prompt is computed: it gets a token from this step, and runs on."""
        self.running[seq.request_id, seq.index] = seq
        step.sample(seq)
        seq.num_tokens += 1

    def _fork(self, seq: Sequence, step: ScheduledStep, headroom: int) -> None:
        """Start the answers to the prompt of `seq` that wait behind it, as far as they fit."""
        while self.waiting and (other := next(iter(self.waiting.values()))).group is seq.group and not other.has_begun:
            if not self.free_req_indices or len(self.block_manager.free_block_ids) <= headroom:
                break
            self.waiting.popitem(last=False)
            self.block_manager.fork(seq, other)
            self._enter(other)
            self._start(other, step)

    def _admit(self, seq: Sequence) -> bool:
        num_running = len(self.running)
        if num_running > self.refill_at and self.num_held < MAX_HELD_STEPS:
            self.num_held += 1
            return False
        self.num_held = 0
        # One block for each that runs: all can grow once before any has to make room for another.
        num_new = len(seq.group) if num_running and seq is seq.group[0] and not seq.has_begun else 1
        headroom = num_running + num_new - 1
        if headroom >= self.max_num_seqs or not self.block_manager.can_allocate(seq, headroom):
            # Full. A prefill step for every sequence that ends would hold up all others: wait for a sixteenth of them.
            self.refill_at = max(0, num_running - max(1, num_running // 16))
            return False
        self.refill_at = self.max_num_seqs
        assert len(seq.token_ids) == seq.num_tokens, "admitted with a token in flight"
        self.block_manager.allocate(seq)
        if not seq.has_begun:  # not one that was preempted
            seq.num_cached_tokens = seq.num_computed_tokens
            self.counts["prompt_tokens"] += seq.num_prompt_tokens
            self.counts["cached_tokens"] += seq.num_cached_tokens
        self._enter(seq)
        return True

    def _enter(self, seq: Sequence) -> None:
        seq.req_index = self.free_req_indices.pop()
        seq.status = SequenceStatus.RUNNING
        seq.mark("scheduled")

    def _schedule_decode(self) -> ScheduledStep:
        step = ScheduledStep(is_prefill=False)
        for seq in list(self.running.values()):
            if seq.status is not SequenceStatus.RUNNING or seq.num_tokens >= seq.max_num_tokens or seq.pauses:
                continue  # preempted above, at its length limit, or a beam, which goes on by `branch`
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
        step.sampled_seqs, step.sampled_rows = [row.seq for row in step.rows], [*range(len(step.rows))]
        return step

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the head of the queue, to be computed again from what it has."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        if not seq.is_paused:
            self._to_head([seq])
        self.num_preemptions += 1

    def branch(self, seq: Sequence, choices: list[tuple[int, int]]) -> list[Sequence]:
        """Let a paused sequence go on with each of several tokens: (index, token id), the first index its own.

        The first is `seq` itself, the others share its blocks. They are at the head of the queue, and the next step
        computes them, as far as there are blocks; those that found none are computed again.
        """
        assert seq.is_paused
        (_, own_token_id), *others = choices
        branches = [seq.continued(*choice) for choice in others]
        for other in branches:
            self.live[seq.request_id][other.index] = other
            if seq.block_table and self.free_req_indices and self.block_manager.free_block_ids:
                self.block_manager.fork(seq, other)
                self._enter(other)
        seq.append(own_token_id)
        self.running.pop((seq.request_id, seq.index), None)
        if seq.block_table and self.block_manager.can_append(seq):
            self.block_manager.may_append(seq)
        elif seq.block_table:
            self._release(seq)
            seq.status = SequenceStatus.WAITING
        self._to_head([seq, *branches])
        return [seq, *branches]

    def _to_head(self, seqs: list[Sequence]) -> None:
        """To the head of the queue, where those that hold blocks stand in front of those that do not."""
        holders = takewhile(lambda seq: seq.status is SequenceStatus.RUNNING, self.waiting.values())
        head = sorted([*holders, *seqs], key=lambda seq: seq.status is not SequenceStatus.RUNNING)
        for seq in reversed(head):
            key = seq.request_id, seq.index
            self.waiting[key] = seq
            self.waiting.move_to_end(key, last=False)

    def postprocess(
        self, step: ScheduledStep, token_ids: list[int], logprobs=None, prompt_logprobs=None
    ) -> list[Sequence]:
        """Take in what a step computed, as `StepResult` has it; the sequences that ended with it."""
        for (seq, start, _), values in zip(step.rows, prompt_logprobs or ()):
            seq.prompt_logprobs[start + 1 : start + 1 + len(values or ())] = values or ()
        finished = []
        for seq, token_id, values in zip(
            step.sampled_seqs, token_ids, logprobs or [None] * len(token_ids), strict=True
        ):
            if seq.status is SequenceStatus.FINISHED:
                continue  # ended while this token was in flight: it is not part of the answer
            if seq.pauses:
                self._pause(seq, values)
                continue
            if values is not None:
                seq.logprobs.append(values)
            seq.token_ids.append(token_id)
            self.counts["output_tokens"] += 1
            if len(seq.token_ids) == seq.num_prompt_tokens + 1:
                seq.mark("first_token")
            self.block_manager.publish(seq)
            if end := self._end_of(seq):
                self.finish(seq, *end)
                finished.append(seq)
        return finished

    def _pause(self, seq: Sequence, candidates: dict) -> None:
        seq.candidates, seq.num_tokens = candidates, len(seq.token_ids)
        self.waiting.pop((seq.request_id, seq.index), None)  # preempted with its step in flight
        self.counts["output_tokens"] += 1
        seq.mark("first_token")

    def _end_of(self, seq: Sequence) -> tuple[str, int | None] | None:
        """Why `seq` ends with its last token, if it does: finish and stop reason."""
        token_id, params = seq.token_ids[-1], seq.params
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        may_stop = len(seq.token_ids) - seq.num_prompt_tokens > params.min_tokens
        if may_stop and (is_eos or token_id in params.stop_token_ids):
            return "stop", None if is_eos and token_id == self.eos_token_id else token_id
        return ("length", None) if len(seq.token_ids) == seq.max_num_tokens else None

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, wherever it is; one that has ended already gets this reason instead."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.status is SequenceStatus.FINISHED:
            return
        self.waiting.pop((seq.request_id, seq.index), None)
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.mark("finished")
        group = self.live[seq.request_id]
        del group[seq.index]
        if not group:
            del self.live[seq.request_id]

    def abort(self, request_id: int) -> list[Sequence]:
        """End a request; those of its sequences that had not ended."""
        seqs = [*self.live.get(request_id, {}).values()]
        for seq in seqs:
            self.finish(seq, "abort")
        return seqs

    def reset(self) -> None:
        """Build all lists anew, wherever an error left them: what has not ended is computed again, from its tokens."""
        seqs = [seq for group in self.live.values() for seq in group.values()]
        self.block_manager.reset()
        self.free_req_indices = list(range(self.max_num_seqs - 1, -1, -1))
        self.refill_at, self.num_held = self.max_num_seqs, 0
        self.live, self.waiting, self.running = {}, OrderedDict(), {}
        for seq in sorted(seqs, key=attrgetter("request_id", "index")):
            seq.block_table, seq.block_hashes, seq.req_index = [], [], -1
            seq.num_computed_tokens, seq.num_tokens = 0, len(seq.token_ids)
            del seq.logprobs[seq.num_tokens - seq.num_prompt_tokens :]
            if not seq.finish_reason and seq.has_begun and not seq.pauses:
                seq.finish_reason, seq.stop_reason = self._end_of(seq) or (None, None)
            seq.status = SequenceStatus.FINISHED if seq.finish_reason else SequenceStatus.WAITING
            if not seq.finish_reason:
                self.live.setdefault(seq.request_id, {})[seq.index] = seq
                if not seq.is_paused:
                    self.waiting[seq.request_id, seq.index] = seq

    def stats(self) -> dict:
        """What `LLMEngine.stats` says."""
        counts, blocks = self.counts, self.block_manager
        num_free = len(blocks.free_block_ids)
        num_cached = sum(blocks.blocks[i].ref_count == 0 for i in [*blocks.hash_to_block_id.values()])
        begun = sum(seq.status is SequenceStatus.RUNNING for seq in [*self.waiting.values()])
        return {
            "requests": {"waiting": len(self.waiting) - begun, "running": len(self.running) + begun},
            "blocks": {"used": len(blocks.blocks) - num_free, "cached": num_cached, "free": num_free - num_cached},
            "prefix_hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
            "preemptions": self.num_preemptions,
            "tokens": {"in": counts["prompt_tokens"], "out": counts["output_tokens"]},
            "steps": {"prefill": counts["prefill_steps"], "decode": counts["decode_steps"]},
        }

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.free_req_indices.append(seq.req_index)
        seq.req_index = -1
        self.running.pop((seq.request_id, seq.index), None)

"""The scheduler chooses the sequences of each step, appends their tokens, and ends sequences."""

from collections import Counter, deque
from collections.abc import Callable, Collection
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from nanovllm.engine import awaiting, forks
from nanovllm.engine.admission import AdmissionPause, TokenBudget, WaitingQueue
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.features import FEATURES, Ends
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep, StepResult
from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.config import Config

MAX_COUNTED_PROMPTS = 64  # at most this many waiting prompts are counted to size a mixed step


class Scheduler:
    """Implements continuous batching.

    A mixed step decodes one token for each running sequence, and computes chunks of prompts in the order of
    `Sequence.order`, within a TokenBudget. A full engine admits new sequences in groups (see AdmissionPause).
    `schedule` may be called before the tokens of the previous step have arrived: sequences that must wait for their
    tokens are left out. forks.py explains several answers to one prompt (`Sequence.group`).
    """

    make_queue: Callable[[], WaitingQueue] = WaitingQueue  # lora/ replaces it
    task = "generate"

    def __init__(self, config: "Config", block_manager: BlockManager | None = None):
        self.config = config
        self.eos_token_ids: frozenset[int] = config.model_config.eos_token_ids
        self.block_manager = block_manager or BlockManager(
            config.num_kvcache_blocks or 0, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.max_num_seqs = config.max_num_seqs
        self.budget = TokenBudget(config.max_num_batched_tokens)
        num_mixed = min(config.max_num_mixed_tokens or inf, config.max_num_batched_tokens)
        self.mixed_budget = TokenBudget(num_mixed, config.model_config.context_of_equal_cost)
        self.num_preemptions = 0
        self.totals: Counter[str] = Counter()
        self.held: dict[Sequence, None] = {}  # sequences that await a feature: see awaiting.py
        self.reset()

    def reset(self) -> None:
        self.block_manager.reset()
        for seq in self.held:
            seq.awaited.cancel()
        self.live: dict[int, dict[int, Sequence]] = {}  # unfinished sequences by request id and index
        self.waiting = self.make_queue()  # sequences without blocks
        self.prefilling: dict[tuple[int, int], Sequence] = {}  # they hold blocks, and their prompts are being computed
        self.running: dict[tuple[int, int], Sequence] = {}  # they hold blocks, and decode or pause after a token
        self.held.clear()
        self.admission = AdmissionPause()
        self.free_req_indices = self.block_manager.req_indices(self.max_num_seqs)

    def add(self, *group: Sequence) -> None:
        if not self.waiting:  # the sequence that paused admission was admitted or aborted
            self.admission.resume()
        for seq in group:
            seq.block_size = self.block_manager.block_size
            seq.limit_tokens()
            self.live.setdefault(seq.request_id, {})[seq.index] = seq
            self.waiting.push(seq)

    def is_finished(self) -> bool:
        return not self.live

    def schedule(self, prompts_first: bool = False) -> ScheduledStep | None:
        """Return the next step, or None if no step is possible before the tokens in flight have arrived.

        prompts_first: do not decode while prompts can be computed, which takes less time in total.
        """
        if not self.block_manager.num_blocks:
            raise RuntimeError("num_kvcache_blocks is not known: make a ModelRunner with this Config first, or set it")
        # copies for forks of earlier steps; forks of this step are copied in the next step, when they are complete
        step = ScheduledStep(copies=self.block_manager.begin_step())
        if prompts_first:
            self.schedule_chunks(step)
            if not step.chunks:
                self.schedule_decodes(step)
        else:
            self.schedule_decodes(step)
            self.schedule_chunks(step, is_mixed=self._decodes_soon(step))
        if not (step.decodes or step.chunks):
            forks.preempt_paused(self, step)
        if not (step.decodes or step.chunks):
            self.block_manager.copies = step.copies
            return None
        watched = [seq for seq in step.sampled_seqs if seq.is_watched]
        seqs = *watched, *step.prompt_seqs  # features have host work only for these
        step.feature_names = {name for seq in seqs for name in seq.feature_state}
        self.totals[f"{step.kind}_steps"] += 1
        return step

    def _decodes_soon(self, step: ScheduledStep) -> bool:
        """Whether this step decodes, or the next step can decode when a token in flight has arrived."""
        return bool(step.num_decodes) or any(seq.waits_for_token and not seq.is_paused for seq in self.running.values())

    def schedule_decodes(self, step: ScheduledStep) -> None:
        """Add a row for each sequence that can decode. If too few blocks are free, preempt sequences."""
        rows = self._ready()
        while len(growing := self.block_manager.prepare_decodes(rows)) > self.block_manager.num_free:
            self.preempt(max((*self.running.values(), *self.prefilling.values()), key=attrgetter("order")))
            rows = self._ready()
        for i in growing:
            seq, _, end = rows[i]
            self.block_manager.may_append(seq, end)
            step.new_blocks.append((i, len(seq.block_table) - 1, seq.block_table[-1]))
        for seq, _, end in rows:
            seq.num_scheduled_tokens = end - seq.num_computed_tokens
            seq.num_computed_tokens, seq.num_tokens = end, end + 1
        step.decode(rows)

    def _ready(self) -> list[ScheduledSequence]:
        """Return a row for each running sequence that can decode, the longest first, to balance attention's load."""
        ready = [seq for seq in self.running.values() if seq.num_tokens < seq.token_limit]
        ready.sort(key=attrgetter("num_tokens"), reverse=True)
        return self.decode_rows(ready)

    def decode_rows(self, seqs: list[Sequence]) -> list[ScheduledSequence]:
        return [ScheduledSequence(seq, seq.num_tokens - 1, seq.num_tokens) for seq in seqs]

    def schedule_chunks(self, step: ScheduledStep, is_mixed: bool = False) -> None:
        """Schedule chunks of partly computed and newly admitted prompts, in order."""
        budget = self.budget
        if is_mixed:
            seqs = (*self.prefilling.values(), *islice(self.waiting, MAX_COUNTED_PROMPTS))
            num_left = sum(seq.num_tokens - seq.num_computed_tokens for seq in seqs)
            budget = self.mixed_budget.for_mixed_step(step.num_decode_tokens, num_left)
        started = deque(sorted(self.prefilling.values(), key=attrgetter("order")))
        can_admit = True
        while budget.num_tokens >= 1:
            first = self.waiting.next_ready() if can_admit else None
            if first is not None and (not started or first.order < started[0].order):
                if not self._admit(first):
                    can_admit = False  # nor can later sequences be admitted
                    continue
                seq = first
            elif started:
                seq = started.popleft()
            else:
                break
            others_wait = bool(started) or (can_admit and len(self.waiting) > 0)
            end = self.chunk_end(budget, seq, others_wait)
            if end == seq.num_computed_tokens:
                self.leave_out(seq, started)
                continue
            budget = self.spend(budget, seq, end)
            self._schedule_chunk(seq, end, step)

    def chunk_end(self, budget: TokenBudget, seq: Sequence, others_wait: bool) -> int:
        end = budget.chunk_end(seq.num_computed_tokens, seq.num_tokens, others_wait)
        return self.block_manager.reserve_chunk(seq, end)

    def leave_out(self, seq: Sequence, started: deque[Sequence]) -> None:
        """Preempt a sequence, because too few blocks are free for the next token of `seq` in layers with a window."""
        started.appendleft(seq)
        self.preempt(started.pop())  # the last in order, perhaps `seq` itself

    def spend(self, budget: TokenBudget, seq: Sequence, end: int) -> TokenBudget:
        """Return the rest of `budget` after a chunk of `seq` that ends at `end`."""
        return budget.minus(seq.num_computed_tokens, end)

    def _schedule_chunk(self, seq: Sequence, end: int, step: ScheduledStep) -> None:
        step.chunks.append(ScheduledSequence(seq, seq.num_computed_tokens, end))
        step.state_rows.append(self.block_manager.state_row(seq))
        seq.num_scheduled_tokens, seq.num_computed_tokens = end - seq.num_computed_tokens, end
        self.block_manager.hash_blocks(seq, end)
        if end == seq.num_tokens:
            self.start_decoding(seq, step)
            if seq.params.n > 1:
                forks.start_others(self, seq, step)

    def start_decoding(self, seq: Sequence, step: ScheduledStep) -> None:
        """Sample a token for `seq` from the step's last row, which completes the prompt."""
        self.prefilling.pop(seq.key, None)
        self.running[seq.key] = seq
        step.add_sampled(seq)
        seq.num_tokens += 1

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.prefilling)

    def num_others(self, seq: Sequence) -> int:
        """Return how many others would run with `seq`."""
        return self.num_running + (forks.num_later_answers(self, seq) if len(seq.group) > 1 else 0)

    def _admit(self, seq: Sequence) -> bool:
        """Admit the first waiting sequence, if the sequence fits and admission is not paused."""
        if not self.admission.may_admit(self.num_running):
            return False
        if len(seq.token_ids) < seq.num_tokens:  # its newest token is in flight
            return False
        num_others = self.num_others(seq)
        # a spare block for each other sequence: all can grow once before any is preempted
        fits = num_others < self.max_num_seqs and self.block_manager.can_allocate(seq, num_spare=num_others)
        if not fits:
            self.admission.pause(self.num_running)
            return False
        self.admission.resume()
        self.waiting.discard(seq)
        self.block_manager.allocate(seq)
        if not any(other.was_admitted for other in seq.group):  # the answers to a prompt count once
            self.totals["prompt_tokens"] += seq.num_prompt_tokens
            self.totals["cached_tokens"] += min(seq.num_cached_tokens, seq.num_prompt_tokens)
        self.set_running(seq)
        self.prefilling[seq.key] = seq
        return True

    def set_running(self, seq: Sequence) -> None:
        seq.req_index = self.free_req_indices.pop()
        seq.status = SequenceStatus.RUNNING
        seq.was_admitted = True
        seq.record_time("scheduled")

    def feature_stats(self) -> dict[str, dict]:
        """Return the entries of `LLMEngine.stats` that only engines with certain settings have."""
        return {}

    def preempt(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence, and queue the sequence again.

        The sequence's tokens are recomputed later.
        """
        self.release(seq)
        seq.status = SequenceStatus.WAITING
        seq.limit_tokens()
        if not seq.is_paused:
            self.waiting.push(seq)
        self.num_preemptions += 1

    def postprocess(self, step: ScheduledStep, result: StepResult) -> Collection[Sequence]:
        """Append a step's tokens, run features, and end sequences. Return the ended and the watched sequences."""
        arrived, ends = self.append_tokens(step.sampled_seqs, result.token_ids)
        return self.run_features(step, result, arrived, ends)

    def append_tokens(self, seqs: list[Sequence], token_ids: list[int]) -> tuple[dict[int, Sequence], Ends]:
        """Append each token to its sequence, unless the sequence has ended or has `pauses_after_token` set.

        Return the watched sequences by index in `token_ids`, and the sequences that must end.
        """
        arrived, ends, num_late = dict[int, Sequence](), Ends(), 0
        block_size = self.block_manager.block_size
        for i, (seq, token_id) in enumerate(zip(seqs, token_ids, strict=True)):
            if seq.finish_reason is not None:
                num_late += 1  # it ended while this token was in flight; the token is not part of the answer
                continue
            if "first_token" not in seq.timing:
                seq.record_time("first_token")
            if seq.is_watched:
                arrived[i] = seq
            if seq.pauses_after_token:
                forks.pause(self, seq)
                continue
            seq.append_token(token_id)
            # A full block enters the prefix cache when its last token is computed. If steps overlap, the next step
            # already computes the newest token. Otherwise, only the tokens before it are computed: hence `<= 1`.
            if len(seq.token_ids) % block_size <= 1:
                self.block_manager.hash_blocks(seq, seq.num_computed_tokens)
            if reasons := seq.finish_reasons(self.eos_token_ids, self.config.eos):
                ends[seq] = reasons
        self.totals["output_tokens"] += len(seqs) - num_late
        return arrived, ends

    def run_features(
        self, step: ScheduledStep, result: StepResult, arrived: dict[int, Sequence], ends: Ends
    ) -> Collection[Sequence]:
        """Call `after_step` of the step's features, and end the sequences in `ends`."""
        for name in [*FEATURES]:  # a copy, because another thread may register a feature
            if name in step.feature_names:
                FEATURES[name].load().after_step(step, arrived, ends, result.feature_results.get(name))
        for seq, reasons in ends.items():
            self.finish(seq, *reasons)
        for seq in arrived.values():
            if seq.awaited is not None and not seq.is_finished:
                awaiting.hold(self, seq)
            seq.limit_tokens()
        return dict.fromkeys([*arrived.values(), *ends]) if ends else arrived.values()

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, whatever its state. Only this method ends sequences.

        Its blocks can be freed while a step in flight writes to them: the device runs steps in order, so their next
        owner writes later.
        """
        self.waiting.discard(seq)
        self.held.pop(seq, None)
        if seq.status is SequenceStatus.RUNNING:
            self.release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        seq.record_time("finished")
        for name in seq.feature_state:
            FEATURES[name].load().forget(seq)
        group = self.live[seq.request_id]
        del group[seq.index]
        if not group:
            del self.live[seq.request_id]

    def abort(self, request_id: int) -> list[Sequence]:
        """End the unfinished sequences of a request, and return them."""
        seqs = [*self.live.get(request_id, {}).values()]
        for seq in seqs:
            self.finish(seq, "abort")
        return seqs

    def release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.free_req_indices.append(seq.req_index)
        seq.req_index = -1
        self.prefilling.pop(seq.key, None)
        self.running.pop(seq.key, None)

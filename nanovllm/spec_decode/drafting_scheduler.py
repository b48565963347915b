"""A scheduler that plans drafts, and that can append several tokens to a sequence in one step."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.spec_decode.proposer import Drafts, make_proposer
from nanovllm.spec_decode.speculative_config import StepCost

if TYPE_CHECKING:
    from nanovllm.config import Config

MEMORY = 8  # the mean acceptance covers about this many steps with drafts; half as many misses in a row cause a pause
PAUSES = 16, 512  # tokens: the first and the longest pause of a sequence
# Models and heads draft about equally well for all texts, so drafting with them pauses for all sequences together.
# Gains and losses are counted in units of a step without drafts. If the loss exceeds a limit, drafting pauses. Each
# step pays off some of the loss, and drafting resumes when the loss and the cost of catching up are paid. The limit is
# higher with few sequences, where chance matters more. Gains up to the same limit offset later losses. Each pause
# halves the amount paid per step, down to a minimum; a gain of the whole limit restores it.
LIMIT, LIMIT_OF_ONE, PAID_PER_STEP, LEAST_PER_STEP, CATCH_UP = 0.2, 1.8, 0.01, 0.00125, 0.5
# If the host drafts for at least one in MANY sequences, all sequences wait for their tokens. Without this wait, the
# other sequences would decode twice in the same time, but the weights would also be read twice.
MANY = 8


@dataclass
class Pace:
    """Decides whether tokens are drafted for a sequence, or drafting pauses.

    A sequence stops drafting for a while if few drafts were accepted, or if several steps in a row had no drafts.
    `mean` is the moving average of accepted drafts per step, and starts at 2. If `mean` falls below the break-even
    point, drafting on the host pauses. Each pause is twice as long as the one before, up to a maximum. After many
    drafts were accepted, pauses are short again. After a pause, `mean` starts at 1.5 times the break-even point.
    """

    mean: float = 2.0
    misses: int = 0
    pause: int = 0  # tokens until the sequence drafts again
    next_pause: int = PAUSES[0]

    def accepted(self, number: int, num_paying: float) -> None:
        """Record that `number` drafts were accepted in a step. With `num_paying` accepted drafts, drafting would break
        even.
        """
        self.mean, self.misses = self.mean + (number - self.mean) / MEMORY, 0
        if self.mean < num_paying:
            self.mean = 1.5 * num_paying
            self._rest()
        elif self.mean > 2 * num_paying:
            self.next_pause = PAUSES[0]

    def missed(self) -> None:
        """Record that the sequence waited for its token in a step, but got no drafts."""
        self.misses += 1
        if self.misses == MEMORY // 2:
            self._rest()

    def _rest(self) -> None:
        self.pause, self.next_pause, self.misses = self.next_pause, min(2 * self.next_pause, PAUSES[1]), 0


def width_that_pays(drafts: list[tuple[int, float]], num_seqs: int, cost: StepCost) -> int:
    """Return the limit for drafts per sequence that maximizes the throughput. All sequences in a step have the same
    number of rows.

    `drafts` contains a pair for each sequence that drafts: the number of drafts, and the expected number of accepted
    drafts.
    """

    def rate(width: int) -> float:
        num_tokens = num_seqs + sum(min(width, length, expected) for length, expected in drafts)
        return num_tokens / cost.of(num_seqs, width)

    return max({0, *(length for length, _ in drafts)}, key=lambda width: (rate(width), -width))


class DraftingScheduler(Scheduler):
    """A scheduler that plans drafts after each step.

    The plan is stored in `feature_state["spec_decode"]`. A decode row contains the newest token and its drafts. Beams
    have no drafts. For sequences with token masks, only the host drafts, because the host makes the masks.
    """

    def __init__(self, config: "Config", block_manager: BlockManager | None = None):
        self.settings = settings = config.speculative_config
        self.proposer = make_proposer(settings)
        self.paces: dict[Sequence, Pace] = {}  # of the sequences that may draft
        self.arrived: dict[Sequence, None] = {}  # the keys of `paces` that have got tokens and need a plan
        self.is_off = False  # True while too many sequences run, or drafts cost more than they gain
        self.lost, self.paid_per_step, self.is_losing = 0.0, PAID_PER_STEP, False
        super().__init__(config, block_manager)

    def decode_rows(self, seqs: list[Sequence]) -> list[ScheduledSequence]:
        if self.is_off:  # no sequence has drafts
            return super().decode_rows(seqs)
        rows = []
        for seq in seqs:
            drafts = seq.feature_state.get("spec_decode")
            num_tokens = seq.num_tokens + (0 if drafts is None else len(drafts.token_ids))
            rows.append(ScheduledSequence(seq, seq.num_tokens - 1, min(num_tokens, seq.token_limit - 1)))
        return rows

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        if seq in self.paces:  # its drafts followed tokens that must be computed again
            seq.feature_state["spec_decode"].token_ids = []

    def postprocess(self, step: ScheduledStep, result: StepResult) -> Collection[Sequence]:
        if result.counts is None:
            changed, num_new = super().postprocess(step, result), [1] * len(step.sampled_seqs)
        else:
            changed, num_new = self._postprocess_rounds(step, result, result.counts), result.counts
        for seq in step.new_seqs:
            if (drafts := seq.feature_state.get("spec_decode")) is not None:
                drafts.is_new = drafts.is_behind = True
        if step.num_decodes and not (self.proposer.on_host or self.settings.is_synthetic):
            self._account(step, sum(num_new[: step.num_decodes]) / step.num_decodes)
        self._draft(step.sampled_seqs, num_new)
        return changed

    def _account(self, step: ScheduledStep, num_tokens: float) -> None:
        """Add the loss of a step to `lost`. `num_tokens` is the average number of tokens that a sequence got in the
        step.

        Losses are measured in units of a step without drafts.
        """
        cost, n, k = self.settings.step_cost.of, step.num_decodes, step.tokens_per_row
        limit = LIMIT + LIMIT_OF_ONE / n
        self.lost = max(-limit, self.lost + cost(n, k - 1) / cost(n) - num_tokens - self.paid_per_step)
        if self.is_losing:
            self.is_losing = self.lost > 0
        elif self.lost > limit:
            self.lost, self.is_losing = self.lost + CATCH_UP, True
            self.paid_per_step = max(LEAST_PER_STEP, self.paid_per_step / 2)
        elif k > 1 and self.lost == -limit:
            self.paid_per_step = PAID_PER_STEP

    def _postprocess_rounds(self, step: ScheduledStep, result: StepResult, counts: list[int]) -> Collection[Sequence]:
        """Process tokens in rounds. Round i appends token i of each sequence that gets more than i tokens."""
        k = step.tokens_per_row
        self._settle(step, counts)
        changed = dict[Sequence, None]()
        for i in range(k):
            chosen = [j for j, count in enumerate(counts) if count > i]  # of the step's `sampled_seqs`
            seqs, token_ids = [step.sampled_seqs[j] for j in chosen], [result.token_ids[j * k + i] for j in chosen]
            arrived, ends = self.append_tokens(seqs, token_ids)
            arrived = {chosen[place] * k + i: seq for place, seq in arrived.items()}
            changed |= dict.fromkeys(self.run_features(step, result, arrived, ends))
        return changed

    def _settle(self, step: ScheduledStep, counts: list[int]) -> None:
        """Undo the reservations for rejected drafts. Sequence i gets `counts[i]` tokens."""
        totals = self.totals
        for seq, num_reserved, count in zip(step.sampled_seqs, step.num_reserved, counts):
            if num_reserved == 1 or seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_tokens -= num_reserved - count
            if seq.status is SequenceStatus.RUNNING:  # a preempted sequence has no computed tokens
                seq.num_computed_tokens -= num_reserved - count
            totals["drafts"] += 1
            totals["draft_tokens"] += num_reserved - 1
            for i in range(count - 1):
                totals[f"accepted_{i}"] += 1
            if not self.settings.is_synthetic:
                cost = self.settings.step_cost
                num_paying = cost.of(step.num_decodes, step.tokens_per_row - 1) / cost.of(step.num_decodes) - 1
                self.paces[seq].accepted(count - 1, num_paying)

    def _draft(self, seqs: list[Sequence], num_new: list[int]) -> None:
        is_off = self.is_losing or len(self.running) > self.settings.disable_by_batch_size
        if is_off and not self.is_off:
            for seq in self.paces:
                self._plan(seq, [], waits=False)
            self.arrived.clear()
        self.is_off = is_off
        if is_off:
            return
        for seq, number in zip(seqs, num_new):
            if seq not in self.paces:
                if seq.status is SequenceStatus.FINISHED or not self._may_draft(seq):
                    continue
                self.paces[seq] = Pace()
                seq.feature_state["spec_decode"] = Drafts()
            self.paces[seq].pause = max(0, self.paces[seq].pause - number)
            self.arrived[seq] = None
        if self.proposer.on_host and self._hold_for_others():
            return
        all_wait = MANY * sum(not pace.pause for pace in self.paces.values()) >= len(self.running)
        planned = [(seq, *self._drafts_of(seq, self.paces[seq])) for seq in self.arrived]
        expected = [(len(drafts), self.paces[seq].mean) for seq, drafts, _ in planned if drafts]
        self.arrived.clear()
        width = width_that_pays(expected, len(self.running), self.settings.step_cost)
        for seq, drafts, may_draft in planned:
            drafts = drafts if self.settings.is_synthetic else drafts[:width]
            # a sequence with a token mask waits for its tokens anyway
            if may_draft and not drafts and seq.token_mask is None:
                self.paces[seq].missed()
            self._plan(seq, drafts, all_wait or (may_draft and not self.paces[seq].pause))

    def _hold_for_others(self) -> bool:
        """Hold sequences whose tokens have arrived, while other drafting sequences are in flight.

        Without this wait, two groups of sequences would run in alternating steps, which would double the number of
        steps.
        """
        if not any(seq.waits_for_token and seq.num_tokens > len(seq.token_ids) for seq in self.paces):
            return False
        for seq in self.arrived:
            if seq.waits_for_token:
                seq.token_limit = seq.num_tokens
        return True

    def _may_draft(self, seq: Sequence) -> bool:
        if seq.token_mask is not None:
            return self.settings.drafts_with_masks
        return not (seq.pauses_after_token or seq.waits_for_token)

    def _drafts_of(self, seq: Sequence, pace: Pace) -> tuple[list[int], bool]:
        """Return the drafts of a sequence, and whether drafting is allowed for the sequence.

        Drafting is not allowed during a pause, or if the sequence must end before a draft could be used.
        """
        k = min(self.settings.num_speculative_tokens, seq.max_num_tokens - len(seq.token_ids) - 1)
        if (self.proposer.on_host and pace.pause) or k <= 0:
            return [], False
        if not self.proposer.on_host:  # the step in flight may leave space for fewer than k drafts
            return [-1] * min(k, seq.max_num_tokens - seq.num_tokens - 1), True
        if seq.num_tokens > len(seq.token_ids) or seq.is_paused or seq.status is not SequenceStatus.RUNNING:
            return [], True  # a token is in flight, its mask is being made, or it was preempted
        drafts = self.proposer.draft(seq, k)
        if self.settings.is_synthetic:
            drafts += [0] * (k - len(drafts))
        if seq.token_mask is not None:
            drafts = seq.token_mask.draft(drafts, k)
        return drafts, True

    def _plan(self, seq: Sequence, drafts: list[int], waits: bool) -> None:
        if self.proposer.on_host:
            seq.waits_for_token = waits or seq.token_mask is not None
            seq.token_limit = seq.max_num_tokens
        if seq.status is not SequenceStatus.RUNNING:
            drafts = []
        state = seq.feature_state["spec_decode"]
        state.token_ids, state.is_behind = drafts, state.is_behind or not drafts
        seq.limit_tokens(1 + len(drafts))

    def feature_stats(self) -> dict[str, dict]:
        accepted = [self.totals[f"accepted_{i}"] for i in range(self.settings.num_speculative_tokens)]
        counts = {
            "drafts": self.totals["drafts"],  # sequences with drafts, summed over steps
            "draft_tokens": self.totals["draft_tokens"],
            "accepted_tokens": sum(accepted),
            "accepted_per_position": accepted,
        }
        return {"spec_decode": counts}

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(seq, reason, stop_reason)
        if self.paces.pop(seq, None) is not None:
            self.arrived.pop(seq, None)
            self.proposer.forget(seq)

    def reset(self) -> None:
        super().reset()
        self.paces.clear()
        self.arrived.clear()
        self.proposer.reset()

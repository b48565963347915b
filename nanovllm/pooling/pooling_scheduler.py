"""Schedules prompts whose outcome is a vector instead of a token."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.config import Config

NO_TOKENS = SamplingParams(temperature=0, max_tokens=1)  # the scheduler ends a sequence before its first token


class PooledSequence(Sequence):
    vector: Any = None  # [N] float32, a NumPy array

    def __init__(self, token_ids: list[int], **options: Any):
        super().__init__(token_ids, NO_TOKENS, **options)
        self.max_num_tokens = self.token_limit = len(token_ids)


class PooledResult(NamedTuple):
    """Holds the result of a step on the host, in place of a `StepResult`.

    vectors: a vector for each sequence in the step's `sampled_seqs`.
    """

    vectors: list[Any]
    feature_results: dict[str, Any]
    counts: None = None


class PoolingScheduler(Scheduler):
    """A scheduler that ends a sequence when its vector has arrived. No step decodes.

    The device runs steps in order, so the blocks of a prompt are free as soon as the prompt's last step is scheduled. A
    full step of short prompts can therefore be launched before the previous step's vectors have arrived. A sequence
    whose last step is scheduled is never computed again, even if a pause of the engine preempts the sequence.
    """

    def __init__(self, config: "Config", *arguments: Any):
        super().__init__(config, *arguments)
        self.task = config.task

    def schedule(self, prompts_first: bool = False) -> ScheduledStep | None:
        for seq in [*self.running.values()]:
            self._free(seq)
        return super().schedule(prompts_first=True)

    def feature_stats(self) -> dict[str, dict]:
        return {"pooled": {self.task: self.totals["pooled_prompts"]}}

    def preempt(self, seq: Sequence) -> None:
        if seq.key in self.running:
            self._free(seq)
        else:
            super().preempt(seq)

    def _free(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that only waits for its vector, because its last step is scheduled."""
        self.release(seq)
        seq.status = SequenceStatus.WAITING

    def start_decoding(self, seq: Sequence, step: ScheduledStep) -> None:
        self.prefilling.pop(seq.key, None)
        self.running[seq.key] = seq
        step.add_sampled(seq)

    def postprocess(self, step: ScheduledStep, result: PooledResult) -> Collection[Sequence]:  # type: ignore[override]
        """Give each sequence its vector, and end the sequence. Return the sequences that ended."""
        arrived = [(seq, x) for seq, x in zip(step.sampled_seqs, result.vectors) if seq.finish_reason is None]
        for seq, vector in arrived:
            assert isinstance(seq, PooledSequence)
            seq.vector = vector
            self.finish(seq, "stop")
        self.totals["pooled_prompts"] += len(arrived)
        return [seq for seq, _ in arrived]

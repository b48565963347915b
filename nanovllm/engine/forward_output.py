"""The output of a step on the device, and the transfer of this output to the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep, StepResult


class SamplerInput(NamedTuple):
    """The sampler's input. `k` is the step's `tokens_per_row`, which is 1 without drafts."""

    hidden_states: torch.Tensor  # [S * k, hidden_size]: the last k tokens of each sampled sequence
    req_indices: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S * k] int32
    block_tables: torch.Tensor  # [S * k, W] int32


class ForwardOutput(NamedTuple):
    token_ids: torch.Tensor  # [S * k] int32, sampled
    results: torch.Tensor  # for the host: token_ids or, if k > 1, [S, k + 1] with k ids and the number of valid ids
    hidden_states: torch.Tensor  # [T, hidden_size], or fewer (see CUDAModelRunner.run_batch)
    sampler_input: SamplerInput


class PendingStep(NamedTuple):
    """A launched step, whose results might not have reached host memory yet."""

    step: ScheduledStep | None  # None on ranks other than 0, which can't `wait`
    results: torch.Tensor  # `ForwardOutput.results`, in host memory
    pending: dict[str, Any]  # the return values of `StepFeature.after_forward`, by feature name
    synchronize: Callable[[], None]  # waits for the device; RuntimeError if another rank is lost or hangs

    def wait(self) -> StepResult:
        """Wait for the device, and return the result. Raises RuntimeError if another rank is lost or hangs."""
        assert self.step is not None
        self.synchronize()
        results = self.results[: len(self.step.sampled_seqs)]
        feature_results = {name: x.result(self.step) for name, x in self.pending.items() if x is not None}
        if results.dim() == 1:
            return StepResult(results.tolist(), feature_results)
        return StepResult(results[:, :-1].flatten().tolist(), feature_results, results[:, -1].tolist())

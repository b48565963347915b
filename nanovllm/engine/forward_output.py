"""What a step leaves on the device, and how its result reaches the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep, StepResult


class SamplerInput(NamedTuple):
    """What the model leaves for the sampler."""

    hidden_states: torch.Tensor  # [S * k, hidden_size], of the last k tokens of each sampled sequence
    req_indices: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S * k] int32
    block_tables: torch.Tensor  # [S * k, W] int32


class ForwardOutput(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [S * k] int32, sampled; k is the step's `tokens_per_row`
    results: torch.Tensor  # for the host: token_ids, or if k > 1 [S, k + 1], k ids and how many of them count
    hidden_states: torch.Tensor  # [T, hidden_size]
    sampler_input: SamplerInput


class PendingStep(NamedTuple):
    """A step that was launched: its results may not be in host memory yet."""

    step: ScheduledStep | None  # only rank 0 has it, and can `wait`
    results: torch.Tensor  # those of its ForwardOutput, in host memory
    pending: dict[str, Any]  # what `StepFeature.after_forward` returned, by the feature's name
    synchronize: Callable[[], None]  # waits for the device; RuntimeError if another rank is lost, or hangs

    def wait(self) -> StepResult:
        """The result, once the step is over; errors are those of `synchronize`."""
        assert self.step is not None
        self.synchronize()
        results = self.results[: len(self.step.sampled_seqs)]
        of_features = {name: found.result(self.step) for name, found in self.pending.items() if found is not None}
        if results.dim() == 1:
            return StepResult(results.tolist(), of_features)
        return StepResult(results[:, :-1].flatten().tolist(), of_features, results[:, -1].tolist())

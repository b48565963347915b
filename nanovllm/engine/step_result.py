"""What a step leaves on the device, and its result on its way to host memory."""

from time import perf_counter
from typing import Any, NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT, TensorParallel


class ForwardOutput(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [S * k] int32, sampled; k is `tokens_per_row`
    results: torch.Tensor  # for the host: token_ids, or if k > 1 [S, k + 1], k ids and how many of them count
    hidden_states: torch.Tensor  # [T, hidden_size]
    sampled_hidden_states: torch.Tensor  # [S * k, hidden_size]


class SamplerInput(NamedTuple):
    """What the model leaves for the sampler."""

    hidden_states: torch.Tensor  # [S * k, hidden_size], of the last k tokens of each sampled sequence
    req_indices: torch.Tensor  # [S * k] int32
    positions: torch.Tensor  # [S * k] int32
    block_tables: torch.Tensor  # [S * k, W] int32


class PendingStep:
    """A step that was launched: its results may not be in host memory yet."""

    def __init__(
        self,
        step: ScheduledStep | None,
        results: torch.Tensor,
        pending: dict[str, Any],
        is_cuda: bool,
        tp: TensorParallel,
    ):
        """`results`, those of a ForwardOutput, are in host memory; `pending` has those of `StepFeature.after_forward`.

        Only rank 0 has the ScheduledStep; the other ranks can `synchronize`, but not `wait` for a result.
        """
        self._step, self._results, self._pending, self._tp = step, results, pending, tp
        self._done = torch.cuda.Event() if is_cuda else None
        if self._done:
            self._done.record()

    def synchronize(self) -> None:
        """Wait until the device has finished the step. RuntimeError if another rank is lost, or hangs."""
        if self._done and self._tp.size == 1:
            self._done.synchronize()
        elif self._done:
            begin = perf_counter()
            while not self._done.query():
                self._tp.check()
                if perf_counter() - begin > STEP_TIMEOUT:
                    raise RuntimeError(f"a step was not over after {STEP_TIMEOUT:.0f} s")

    def wait(self) -> StepResult:
        """The result, once the step is over; errors as of `synchronize`."""
        self.synchronize()
        assert self._step is not None, "only rank 0 has results"
        results = self._results[: len(self._step.sampled_seqs)]
        of_features = {name: found.result(self._step) for name, found in self._pending.items() if found is not None}
        if results.dim() == 1:
            return StepResult(results.tolist(), of_features)
        return StepResult(results[:, :-1].flatten().tolist(), of_features, results[:, -1].tolist())

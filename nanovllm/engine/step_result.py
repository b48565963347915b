"""What a step leaves on the device, and its result on its way to host memory."""

from time import perf_counter
from typing import Any, NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT, TensorParallel


class ForwardOutput(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [S] int32, sampled
    hidden_states: torch.Tensor  # [T, hidden_size]
    sampled_hidden_states: torch.Tensor  # [S, hidden_size]


class SamplerInput(NamedTuple):
    """What the model leaves for the sampler."""

    hidden_states: torch.Tensor  # [S, hidden_size], of the last token of each sampled sequence
    req_indices: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, W] int32


class PendingStep:
    """A step that was launched: its results may not be in host memory yet."""

    def __init__(
        self,
        step: ScheduledStep | None,
        token_ids: torch.Tensor,
        pending: dict[str, Any],
        is_cuda: bool,
        tp: TensorParallel,
    ):
        """`token_ids` [S] or longer are in host memory; `pending` has the results of `StepFeature.after_forward`.

        Only rank 0 has the ScheduledStep; the other ranks can `synchronize`, but not `wait` for a result.
        """
        self._step, self._token_ids, self._pending, self._tp = step, token_ids, pending, tp
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
        token_ids = self._token_ids[: len(self._step.sampled_seqs)].tolist()
        results = {name: found.result(self._step) for name, found in self._pending.items() if found is not None}
        return StepResult(token_ids, results)

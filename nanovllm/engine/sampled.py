"""What a step samples, on its way into host memory, with log-probabilities where they are asked for."""
from time import perf_counter
from typing import NamedTuple

import torch

from nanovllm.engine.scheduler import ScheduledSequence, ScheduledStep
from nanovllm.utils.distributed import STEP_TIMEOUT, TensorParallel

Logprobs = dict[int, float]  # by token id: first the token that is there, then the most likely ones


class Sampled(NamedTuple):
    """What a step delivers; log-probabilities are those of the logits as the model gives them.

    token_ids: one for each of the step's `sampled`.
    logprobs: of each of those tokens, None where they are not asked for.
    prompt_logprobs: for each of a prefill step's `rows`, of the prompt's tokens from start + 1 to end as far as there are; None
        where they are not asked for, or there are none. A row that is computed again, after a preemption, has them again.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | None]


class LogprobRow(NamedTuple):
    """Who is asked for log-probabilities: the `sample`-th token of a step, or `token_id` after the `row`-th hidden state."""

    most: int
    sample: int = -1
    row: int = 0
    token_id: int = -1


def logprob_rows(step: ScheduledStep) -> list[LogprobRow]:
    """Those of the prompts in `rows`, in their order, and then those of `sampled`."""
    found, first = [], 0
    for row in step.rows if step.is_prefill else ():
        tokens = [(p, row.seq.token_ids[p]) for p in _prompt_targets(row)]
        found += [LogprobRow(row.seq.params.prompt_logprobs, row=first + p - 1 - row.start, token_id=i) for p, i in tokens]
        first += row.end - row.start
    wanted = [(i, seq.params.logprobs) for i, seq in enumerate(step.sampled)]
    return found + [LogprobRow(most, sample=i) for i, most in wanted if most is not None]


def _prompt_targets(row: ScheduledSequence) -> range:
    """Positions of the prompt's tokens whose log-probabilities this row has to deliver."""
    if row.seq.params.prompt_logprobs is None:
        return range(0)
    return range(row.start + 1, min(row.end + 1, row.seq.num_prompt_tokens))


class SampledTokens:
    """Ids and log-probabilities that may not have arrived yet."""

    def __init__(
        self, step: ScheduledStep | None, token_ids: torch.Tensor, logprobs: tuple, is_cuda: bool, tp: TensorParallel
    ):
        """Ids [S] or more in host memory; ids and log-probabilities of the step's `logprob_rows` on the device, if any.

        Without a step, which is rank 0's alone, one can wait for it to be over.
        """
        self._token_ids = token_ids
        self._step = step
        self._tp = tp
        self._logprobs = [_to_host(x) for x in logprobs]
        self._arrived = torch.cuda.Event() if is_cuda else None
        if self._arrived:
            self._arrived.record()

    def wait_until_over(self) -> None:
        """RuntimeError where that will not be, as another rank is gone or hangs."""
        if self._arrived and self._tp.size == 1:
            self._arrived.synchronize()
        elif self._arrived:
            begin = perf_counter()
            while not self._arrived.query():
                self._tp.check()
                if perf_counter() - begin > STEP_TIMEOUT:
                    raise RuntimeError(f"a step was not over after {STEP_TIMEOUT:.0f} s")

    def wait(self) -> Sampled:
        self.wait_until_over()
        rows = zip(logprob_rows(self._step) if self._logprobs else (), *(x.tolist() for x in self._logprobs))
        found = iter([dict(zip(ids[: row.most + 1], values[: row.most + 1])) for row, ids, values in rows])
        counts = [len(_prompt_targets(row)) for row in self._step.rows] if self._step.is_prefill else []
        prompt_logprobs = [[next(found) for _ in range(count)] or None for count in counts]
        logprobs = [None if seq.params.logprobs is None else next(found) for seq in self._step.sampled]
        return Sampled(self._token_ids[: len(self._step.sampled)].tolist(), logprobs, prompt_logprobs)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)

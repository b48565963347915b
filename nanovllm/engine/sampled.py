"""What a step samples, on its way into host memory, with log-probabilities where they are asked for."""
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from nanovllm.engine.scheduler import ScheduledStep
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
    """Hidden state `row` of a step is asked for the log-probability of what comes next, and the `most` likely tokens."""

    most: int
    row: int
    index: int  # in the step's `rows` for a token of the prompt, else in its `sampled`
    token_id: int = -1  # of a prompt


def logprob_rows(step: ScheduledStep, sample_rows: Sequence[int]) -> list[LogprobRow]:
    """Those of prompts, and then those of `sampled`, whose hidden states are `sample_rows`."""
    found, first = [], 0
    for i, (seq, start, end) in enumerate(step.rows if step.is_prefill else ()):
        if (most := seq.params.prompt_logprobs) is not None:
            positions = range(start + 1, min(end + 1, seq.num_prompt_tokens))
            found += [LogprobRow(most, first + p - 1 - start, i, seq.token_ids[p]) for p in positions]
        first += end - start
    wanted = [(seq.params.logprobs, sample_rows[i], i) for i, seq in enumerate(step.sampled)]
    return found + [LogprobRow(*row) for row in wanted if row[0] is not None]


class SampledTokens:
    """Ids and log-probabilities that may not have arrived yet."""

    def __init__(
        self, step: ScheduledStep | None, token_ids: torch.Tensor, asked: list[LogprobRow], logprobs: tuple,
        is_cuda: bool, tp: TensorParallel,
    ):  # fmt: skip
        """Ids [S] or more in host memory; ids and log-probabilities of the rows of `asked` on the device, if there are any.

        Without a step, which rank 0 alone has, one can wait until it is over.
        """
        self._step, self._token_ids, self._asked, self._tp = step, token_ids, asked, tp
        self._logprobs = [torch.empty_like(x, device="cpu", pin_memory=is_cuda).copy_(x, non_blocking=True) for x in logprobs]
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
        step, prompt_logprobs, logprobs = self._step, defaultdict(list), {}
        for row, ids, values in zip(self._asked, *(x.tolist() for x in self._logprobs)):
            found = dict(zip(ids[: row.most + 1], values[: row.most + 1]))
            if row.token_id < 0:
                logprobs[row.index] = found
            else:
                prompt_logprobs[row.index].append(found)
        num_sampled = len(step.sampled)
        of_sampled = [logprobs.get(i) for i in range(num_sampled)]
        of_prompts = [prompt_logprobs.get(i) for i in range(len(step.rows))]
        return Sampled(self._token_ids[:num_sampled].tolist(), of_sampled, of_prompts)

"""What a step samples, on its way into host memory, with log-probabilities where they are asked for."""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.layers.logits import log_probabilities
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT, TensorParallel

# (log-probability, rank) by token id: first the token that is there, then the most likely ones in their order. The most
# likely has rank 1, and of equal ones the lower id comes first.
Logprobs = dict[int, tuple[float, int]]
ALL = 2**30  # log-probabilities: more than there are tokens
MAX_LOGPROB_ROWS = 64  # log-probabilities are made of so many tokens at a time: they take more memory than logits


class StepResult(NamedTuple):
    """What a step delivers; log-probabilities are those of the logits as the model gives them.

    token_ids: one for each of the step's `sampled_seqs`.
    logprobs: of each of those tokens, None where they are not asked for.
    prompt_logprobs: for each of a prefill step's `rows`, of the prompt's tokens from start + 1 to end as far as there
        are; None where they are not asked for, or there are none. A row that is computed again, after a preemption, has
        them again.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | None]


class LogprobRequest(NamedTuple):
    """A token whose log-probability is wanted, and those of the `most` likely in its place."""

    most: int
    row: int  # of the step's hidden states for a token of the prompt, else of those that are sampled: `index`
    index: int  # in the step's `rows` for a token of the prompt, else in its `sampled_seqs`
    token_id: int = -1  # of a prompt


def logprob_requests(step: ScheduledStep) -> list[LogprobRequest]:
    """Those of prompts, and then those of `sampled_seqs`."""
    found, first = [], 0
    for i, (seq, start, end) in enumerate(step.rows if step.is_prefill else ()):
        if (most := seq.params.prompt_logprobs) is not None:
            positions = range(start + 1, min(end + 1, seq.num_prompt_tokens))
            most = ALL if most < 0 else most
            found += [LogprobRequest(most, first + p - 1 - start, i, seq.token_ids[p]) for p in positions]
        first += end - start
    for i, seq in enumerate(step.sampled_seqs):
        if (most := seq.params.logprobs) is not None:
            found.append(LogprobRequest(ALL if most < 0 else most, i, i))
    return found


def logprobs_of(
    batch, asked: list[LogprobRequest], compute_logits: Callable, token_ids: torch.Tensor, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What `log_probabilities` gives for each of `asked`, of a step's batch on the host, sampled ids and hidden states.

    Logits are computed again: those of prompts in pieces, and those of sampled tokens for all rows of the step. How a
    matrix product is rounded depends on its number of rows, and so a greedy token has rank 1 here too.
    """
    num_prompt = sum(row.token_id >= 0 for row in asked)
    most = max(row.most for row in asked)
    pinned = torch.tensor([row[1:] for row in asked], device="cpu", pin_memory=hidden_states.is_cuda)
    rows, indices, chosen = pinned.to(hidden_states.device, non_blocking=True).unbind(1)
    chosen = torch.cat((chosen[:num_prompt], token_ids[indices[num_prompt:]]))
    pieces = []
    for first in range(0, num_prompt, MAX_LOGPROB_ROWS):
        piece = slice(first, min(first + MAX_LOGPROB_ROWS, num_prompt))
        logits = compute_logits(hidden_states.index_select(0, rows[piece]))
        pieces.append(log_probabilities(logits, chosen[piece], most))
    if num_prompt < len(asked):
        if batch.shape.is_prefill:
            logits_indices = torch.from_numpy(batch.logits_indices).to(hidden_states.device, non_blocking=True)
            hidden_states = hidden_states.index_select(0, logits_indices)
        logits = compute_logits(hidden_states)
    for first in range(num_prompt, len(asked), MAX_LOGPROB_ROWS):
        piece = slice(first, first + MAX_LOGPROB_ROWS)
        pieces.append(log_probabilities(logits.index_select(0, rows[piece]), chosen[piece], most))
    return tuple(map(torch.cat, zip(*pieces)))


class PendingStep:
    """Ids and log-probabilities that may not have arrived yet."""

    def __init__(
        self,
        step: ScheduledStep | None,
        token_ids: torch.Tensor,
        asked: list[LogprobRequest],
        logprobs: tuple,
        is_cuda: bool,
        tp: TensorParallel,
    ):
        """Ids [S] or more in host memory; what `log_probabilities` gives for `asked` on the device, if there are any.

        Without a step, which rank 0 alone has, one can wait until it is over.
        """
        self._step, self._token_ids, self._asked, self._tp = step, token_ids, asked, tp
        on_host = [torch.empty_like(x, device="cpu", pin_memory=is_cuda) for x in logprobs]
        self._logprobs = [y.copy_(x, non_blocking=True) for x, y in zip(logprobs, on_host)]
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

    def wait(self) -> StepResult:
        self.wait_until_over()
        step, prompt_logprobs, logprobs = self._step, defaultdict(list), {}
        for row, ids, values, rank in zip(self._asked, *(x.tolist() for x in self._logprobs)):
            found = {ids[0]: (values[0], rank)}
            found |= zip(ids[1 : row.most + 1], zip(values[1:], count(1)))
            if row.token_id < 0:
                logprobs[row.index] = found
            else:
                prompt_logprobs[row.index].append(found)
        num_sampled = len(step.sampled_seqs)
        of_sampled = [logprobs.get(i) for i in range(num_sampled)]
        of_prompts = [prompt_logprobs.get(i) for i in range(len(step.rows))]
        return StepResult(self._token_ids[:num_sampled].tolist(), of_sampled, of_prompts)

"""What a step leaves on the device, and its results on their way to host memory."""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.layers.logits import log_probabilities
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT, TensorParallel

# (log-probability, rank) by token id: first the token of the text, then the most likely ones in descending order. The
# most likely token has rank 1; of equally likely tokens the one with the lower id comes first.
Logprobs = dict[int, tuple[float, int]]
ALL_TOKENS = 2**30  # for `num_top`: more than any vocabulary has
MAX_LOGPROB_ROWS = 64  # computed at a time, as log-probabilities take more memory than logits


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


class StepBuffers(NamedTuple):
    """Host memory of one step, pinned on CUDA: int32 words of its batch and the token ids that it samples."""

    batch: torch.Tensor
    token_ids: torch.Tensor


class StepResult(NamedTuple):
    """The outcome of a step on the host. Log-probabilities are those of the model's own logits.

    token_ids: one for each of the step's `sampled_seqs`.
    logprobs: for each of those tokens, None without a request for them; empty if there is none with a request.
    prompt_logprobs: for each of the step's `chunks`, those of the prompt's tokens from start + 1 to end, as far as the
        prompt goes; None without a request, or where there are no such tokens. A chunk that is computed again after a
        preemption has them again.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | None]


class LogprobRequest(NamedTuple):
    """A token whose log-probability is wanted, together with those of the `num_top` most likely tokens at its position.

    A token of a prompt has its id here; a sampled one has token_id -1, as the host does not know it yet.
    """

    num_top: int
    row: int  # of the hidden states: all of the step's for a token of a prompt, else those that are sampled
    result_index: int  # into StepResult.prompt_logprobs for a token of a prompt, else into StepResult.logprobs
    token_id: int = -1


def logprob_requests(step: ScheduledStep) -> list[LogprobRequest]:
    """First those for tokens of prompts, then those for `sampled_seqs`."""
    requests, first = [], step.num_decodes
    for i, (seq, start, end) in enumerate(step.chunks):
        if (num_top := seq.params.prompt_logprobs) is not None:
            num_top = ALL_TOKENS if num_top < 0 else num_top
            positions = range(start + 1, min(end + 1, seq.num_prompt_tokens))
            requests += [LogprobRequest(num_top, first + p - 1 - start, i, seq.token_ids[p]) for p in positions]
        first += end - start
    for i in step.visited:
        if (num_top := step.sampled_seqs[i].params.logprobs) is not None:
            requests.append(LogprobRequest(ALL_TOKENS if num_top < 0 else num_top, i, i))
    return requests


def compute_logprobs(
    requests: list[LogprobRequest],
    compute_logits: Callable,
    token_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    sampled_hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The tensors of `log_probabilities` for `requests`, from the step's sampled ids and hidden states.

    Logits are computed again: in pieces for prompts, but for all sampled rows at once, as in the step itself. The
    rounding of a matrix product depends on its number of rows; so a greedy token has rank 1 here too.
    """
    num_prompt = sum(request.token_id >= 0 for request in requests)
    num_top = max(request.num_top for request in requests)
    columns = torch.tensor([request[1:] for request in requests], device="cpu", pin_memory=hidden_states.is_cuda)
    rows, indices, chosen = columns.to(hidden_states.device, non_blocking=True).unbind(1)
    chosen = torch.cat((chosen[:num_prompt], token_ids[indices[num_prompt:]]))
    pieces = []
    for first in range(0, num_prompt, MAX_LOGPROB_ROWS):
        piece = slice(first, min(first + MAX_LOGPROB_ROWS, num_prompt))
        logits = compute_logits(hidden_states.index_select(0, rows[piece]))
        pieces.append(log_probabilities(logits, chosen[piece], num_top))
    if num_prompt < len(requests):
        logits = compute_logits(sampled_hidden_states)
    for first in range(num_prompt, len(requests), MAX_LOGPROB_ROWS):
        piece = slice(first, first + MAX_LOGPROB_ROWS)
        pieces.append(log_probabilities(logits.index_select(0, rows[piece]), chosen[piece], num_top))
    return tuple(map(torch.cat, zip(*pieces)))


class PendingStep:
    """A step that was launched: its token ids and log-probabilities may not be in host memory yet."""

    def __init__(
        self,
        step: ScheduledStep | None,
        token_ids: torch.Tensor,
        requests: list[LogprobRequest],
        logprobs: tuple[torch.Tensor, ...],
        is_cuda: bool,
        tp: TensorParallel,
    ):
        """`token_ids` [S] or longer are in host memory; `logprobs` are what `compute_logprobs` returns.

        Only rank 0 has the ScheduledStep; the other ranks can `synchronize`, but not `wait` for a result.
        """
        self._step, self._token_ids, self._requests, self._tp = step, token_ids, requests, tp
        on_host = [torch.empty_like(x, device="cpu", pin_memory=is_cuda) for x in logprobs]
        self._logprobs = [y.copy_(x, non_blocking=True) for x, y in zip(logprobs, on_host)]
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
        step, prompt_logprobs, logprobs = self._step, defaultdict(list), {}
        for request, ids, values, rank in zip(self._requests, *(x.tolist() for x in self._logprobs)):
            found = {ids[0]: (values[0], rank)}
            found |= zip(ids[1 : request.num_top + 1], zip(values[1:], count(1)))
            if request.token_id < 0:
                logprobs[request.result_index] = found
            else:
                prompt_logprobs[request.result_index].append(found)
        num_sampled = len(step.sampled_seqs)
        return StepResult(
            self._token_ids[:num_sampled].tolist(),
            [logprobs.get(i) for i in range(num_sampled)] if logprobs else [],
            [prompt_logprobs.get(i) for i in range(len(step.chunks))],
        )

"""Computes log-probabilities of generated tokens and of prompt tokens.

For generated tokens, the setting `logprobs_mode` selects which logits are used. For prompt tokens, the model's raw
logits are always used. Beam search needs log-probabilities, and so do requests that set `logprobs` or
`prompt_logprobs`. A step contains a `LogprobRequest` for each token whose log-probabilities are needed. After the
forward pass, every rank creates a `PendingLogprobs`, which computes the log-probabilities. The log-probabilities reach
the host with the step's result. Finally, logprob_outputs.py adds the text of the tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.engine.features import FEATURES, Arrays, Ends, StepFeature
from nanovllm.engine.forward_output import ForwardOutput, SamplerInput
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.features.logprob_outputs import KeptLogprobs, Logprobs, OutputLogprobs, unpack
from nanovllm.kernels import operation
from nanovllm.layers.sampler import SamplingRows, logit_cutoffs, token_keys
from nanovllm.utils.checks import check_int
from nanovllm.utils.cuda_driver import DeviceBytes

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest

ALL_TOKENS = 2**30  # for `num_top`: more than any vocabulary has
# rows that are computed at a time: the top tokens take more memory than the logits, a single token takes less
MAX_TOP_ROWS, MAX_ROWS = 64, 256


class SequenceLogprobs:
    """Stores a sequence's log-probabilities after they have arrived on the host."""

    def __init__(self, is_edited: bool) -> None:
        self.is_edited = is_edited  # whether features edit the logits
        self.of_tokens: list[KeptLogprobs] = []  # for each generated token
        self.of_prompt: list[KeptLogprobs | None] = [None]  # for each token of the prompt; None for the first token
        self.candidates: Logprobs = {}  # if the sequence pauses after each token: candidates for the next token

    def take_candidates(self) -> Logprobs:
        """Return the candidates and delete them from this object, so that a fork does not copy them."""
        taken, self.candidates = self.candidates, {}
        return taken


class StepLogprobs(NamedTuple):
    """Contains the log-probabilities of a step. An entry that no request asked for is None.

    of_tokens: one entry for each token of `StepResult.token_ids`.
    of_prompts: one item for each chunk of the step. An item is None, or a list with an entry for each prompt token from
        `start + 1` to `end`. If a chunk is recomputed, the chunk's list is returned again.
    """

    of_tokens: list[KeptLogprobs | None]
    of_prompts: list[list[KeptLogprobs] | None]


class TokenLogprobs(StepFeature):
    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        params = request.params
        for name in ("logprobs", "prompt_logprobs"):
            check_num_logprobs(name, getattr(params, name) or 0, processor.config)
        request.logprobs = OutputLogprobs(params, processor.all_token_bytes)
        for seq in request.group:
            cls.watch(seq)

    @staticmethod
    def watch(seq: Sequence) -> None:
        """Start to collect the log-probabilities that the parameters of `seq` require."""
        features = [FEATURES[name] for name in seq.feature_state if name != "logprobs"]
        features += [feature for feature in FEATURES.values() if isinstance(feature.home, type)]  # they edit all rows
        is_edited = any(feature.load().edit_logits is not StepFeature.edit_logits for feature in features)
        seq.feature_state["logprobs"] = SequenceLogprobs(is_edited)
        seq.is_watched |= seq.params.logprobs is not None
        seq.skips_prefix_hits = seq.params.prompt_logprobs is not None  # `prompt_logprobs` needs every position

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        if not len(requests := logprob_requests(step)):
            return None
        states = (step.sampled_seqs[i].feature_state.get("logprobs") for i in step.watched)
        return {"requests": requests, "is_edited": np.array([any(x is not None and x.is_edited for x in states)])}

    @classmethod
    def max_words(cls, config: "Config") -> int:
        return len(LogprobRequest._fields) * (config.max_num_batched_tokens + config.max_num_seqs) + 1 + 2 * 4

    def __init__(self, runner: "ModelRunner"):
        self._runner = runner
        self._logits_of_graphs: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}  # by address and size

    def edit_logits(self, logits: torch.Tensor, rows: SamplingRows) -> None:
        """Record where a CUDA graph stores its logits, without editing the logits.

        The logits stay valid until the next graph replay. The recorded view does not own the logits' memory, so other
        graphs can reuse this memory.
        """
        if logits.is_cuda and torch.cuda.is_current_stream_capturing():
            memory, like, device = DeviceBytes(logits.data_ptr(), logits.nbytes), logits.to("meta"), logits.device
            view = cache(lambda: memory.tensor(device).view(like.dtype).view(like.shape))
            self._logits_of_graphs[rows.positions.data_ptr(), len(logits)] = view

    def after_forward(self, arrays: Arrays, output: ForwardOutput) -> "PendingLogprobs":
        positions, find = output.sampler_input.positions, None
        # not with several ranks (each has a part of the logits), and not with drafts (acceptance may be synthetic)
        if not arrays["is_edited"][0] and self._runner.tp.size == self._runner.config.tokens_per_row == 1:
            find = self._logits_of_graphs.get((positions.data_ptr(), len(positions)))
        return PendingLogprobs(arrays["requests"], self._runner, output, find and find())

    @classmethod
    def after_step(
        cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: StepLogprobs | None
    ) -> None:
        """Store the log-probabilities of each sequence.

        If a sequence pauses after each token, store the candidates for the next token instead.
        """
        if result is None:
            return
        for (seq, start, _), prompt_logprobs in zip(step.chunks, result.of_prompts):
            if prompt_logprobs:
                seq.feature_state["logprobs"].of_prompt[start + 1 : start + 1 + len(prompt_logprobs)] = prompt_logprobs
        for i, seq in arrived.items():
            if (of_token := result.of_tokens[i]) is None:
                continue
            if seq.pauses_after_token:
                seq.feature_state["logprobs"].candidates = unpack(of_token)
            else:
                seq.feature_state["logprobs"].of_tokens.append(of_token)


def check_num_logprobs(name: str, value: int, config: "Config") -> None:
    """Raise ValueError if a request may not ask for `value` log-probabilities per token.

    -1 stands for all tokens of the vocabulary.
    """
    vocab_size, max_logprobs = config.model_config.vocab_size, config.max_logprobs
    check_int(name, value, -1, vocab_size)
    if max_logprobs >= 0 and (vocab_size if value == -1 else value) > max_logprobs:
        raise ValueError(f"{name}={value}: must be at most max_logprobs={max_logprobs} (-1 is all tokens)")


class LogprobRequest(NamedTuple):
    """A request for the log-probabilities of a token, and of the `num_top` most likely tokens at the same position.

    `token_id` is -1 for a sampled token, which the host does not know yet.
    """

    num_top: int
    row: int  # index into all hidden states of the step (prompt token) or into the sampled rows (sampled token)
    result_index: int  # index into StepLogprobs.of_prompts (prompt token) or StepLogprobs.of_tokens (sampled token)
    token_id: int = -1


def logprob_requests(step: ScheduledStep) -> np.ndarray:
    """Return an int32 array [n, 4] with the LogprobRequests of a step.

    Requests for prompt tokens come first, and requests for sampled tokens follow.
    """
    of_prompts, first_row, k = [], step.num_decode_tokens, step.tokens_per_row
    for i, (seq, start, end) in enumerate(step.chunks):
        if (num_top := seq.params.prompt_logprobs) is not None:
            positions = range(start + 1, min(end + 1, seq.num_prompt_tokens))
            of_prompts += [LogprobRequest(num_top, first_row + p - 1 - start, i, seq.token_ids[p]) for p in positions]
        first_row += end - start
    # vectorized, because all sequences of a batch may ask for log-probabilities in each step
    all_top = [step.sampled_seqs[i].params.logprobs for i in step.watched]
    watched_rows = [i for i, num_top in zip(step.watched, all_top) if num_top is not None]
    requests = np.full((len(of_prompts) + len(watched_rows) * k, len(LogprobRequest._fields)), -1, np.int32)
    num_top, rows, result_indices, _ = requests[len(of_prompts) :].T
    num_top[:] = np.repeat([num_top for num_top in all_top if num_top is not None], k)
    rows[:] = result_indices[:] = (np.array(watched_rows, np.int32)[:, None] * k + np.arange(k)).ravel()
    if of_prompts:
        requests[: len(of_prompts)] = of_prompts
    requests[requests[:, 0] < 0, 0] = ALL_TOKENS
    return requests


class PendingLogprobs:
    """Holds a step's log-probabilities while they are computed and copied to the host."""

    @torch.inference_mode()
    def __init__(self, requests: np.ndarray, runner: "ModelRunner", output: ForwardOutput, logits: torch.Tensor | None):
        """Each row of `requests` [n, 4] contains the fields of a `LogprobRequest`.

        `logits` contains the logits of the sampled rows, or is None if these logits no longer exist.
        """
        self._requests = requests.copy()  # a later step overwrites the original
        on_device = self._compute(runner, output, logits)
        runner.tp.barrier(output.token_ids.device)  # no rank may overwrite peer memory that another rank still reads
        on_host = [torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in on_device]
        self._on_host = [y.copy_(x, non_blocking=True) for x, y in zip(on_device, on_host)]

    def _compute(
        self, runner: "ModelRunner", output: ForwardOutput, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `log_probabilities` for all requests.

        Logits that no longer exist are recomputed. Prompt tokens are processed in pieces. Sampled rows are processed in
        one GEMM with the same number of rows as in the step, because rounding depends on the number of rows. With other
        rounding, a greedily chosen token might not have rank 1.
        """
        requests, hidden_states = self._requests, output.hidden_states
        columns = torch.from_numpy(requests.T.copy())
        columns = columns.pin_memory() if hidden_states.is_cuda else columns
        num_prompt, num_top = int((requests[:, 3] >= 0).sum()), int(requests[:, 0].max())
        _, rows, indices, chosen = columns.to(hidden_states.device, non_blocking=True)
        chosen = torch.cat((chosen[:num_prompt], output.token_ids[indices[num_prompt:]]))
        pieces = []
        for piece_rows, ids in zip(rows[:num_prompt].split(MAX_TOP_ROWS), chosen[:num_prompt].split(MAX_TOP_ROWS)):
            piece = runner.model.compute_logits(hidden_states.index_select(0, piece_rows))
            pieces.append(log_probabilities(piece, ids, num_top))
        if num_sampled := len(requests) - num_prompt:
            of_rows = sampled_logits(runner, output.sampler_input, logits)
            if not (requests[num_prompt:, 1] == np.arange(num_sampled)).all():
                of_rows = [x.index_select(0, rows[num_prompt:]) for x in of_rows]
            size = MAX_TOP_ROWS if num_top else MAX_ROWS
            for first in range(0, num_sampled, size):
                piece, *temperatures = (x[first : min(first + size, num_sampled)] for x in of_rows)
                pieces.append(
                    log_probabilities(piece, chosen[num_prompt:][first : first + size], num_top, *temperatures)
                )
        return tuple(map(torch.cat, zip(*pieces)))

    def result(self, step: ScheduledStep) -> StepLogprobs:
        """Return the log-probabilities. The device must have finished the step."""
        kept_logprobs: list[KeptLogprobs] = []
        on_host = (x.numpy().tolist() for x in self._on_host)  # the `tolist` of PyTorch takes fifty times as long
        for num_top, ids, values, rank in zip(self._requests[:, 0].tolist(), *on_host):
            kept: KeptLogprobs = (ids[0], values[0], rank)
            if num_top:
                top = zip(ids[1 : num_top + 1], values[1:], count(1))
                kept += tuple(x for entry in top if entry[0] != ids[0] for x in entry)
            kept_logprobs.append(kept)
        of_tokens: list[KeptLogprobs | None] = [None] * (len(step.sampled_seqs) * step.tokens_per_row)
        of_prompts = defaultdict(list)
        for (_, _, i, token_id), kept in zip(self._requests.tolist(), kept_logprobs):
            if token_id < 0:
                of_tokens[i] = kept
            else:
                of_prompts[i].append(kept)
        return StepLogprobs(of_tokens, [of_prompts.get(i) for i in range(len(step.chunks))])


def sampled_logits(runner: "ModelRunner", x: SamplerInput, logits: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the logits [S, vocabulary] for `logprobs_mode`, and the temperatures [S] by which the logits are divided.

    In the mode "raw_logprobs", no temperatures are returned. `logits` are the model's raw logits, or None if the raw
    logits no longer exist.
    """
    mode = runner.config.logprobs_mode
    if logits is None or mode == "processed_logprobs":
        logits = runner.model.compute_logits(x.hidden_states)
    if mode == "raw_logprobs":
        return [logits]
    rows = runner.sampling_rows(x)
    if mode == "processed_logprobs":
        for feature in runner.features.values():
            feature.edit_logits(logits, rows)
        cutoffs, logits = logit_cutoffs(logits, rows), logits.float()
        keys = token_keys(logits, torch.arange(logits.shape[1], device=logits.device))
        logits.masked_fill_(keys < cutoffs.unsqueeze(1), -torch.inf)
    temperatures = rows.column("temperature")
    return [logits, temperatures.where(temperatures > 0, 1)]


@operation
def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [S] float32 and the ranks [S] int32 of `token_ids` [S].

    Row `i` of `logits` [S, vocabulary] belongs to `token_ids[i]`. Row `i` is first divided by `temperatures[i]`. Tokens
    are ranked by descending logit. Among equal logits, the lower id comes first.
    """
    logits, token_ids = divided(logits, temperatures), token_ids.unsqueeze(1).long()
    chosen = logits.gather(1, token_ids)
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > chosen) | ((logits == chosen) & (ids < token_ids))
    return chosen.squeeze(1) - logits.logsumexp(1), is_before.sum(1, dtype=torch.int32) + 1


def log_probabilities(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities of `token_ids` [S] and of the `num_top` most likely tokens in each row.

    The `logits` [S, vocabulary] are first divided by `temperatures` [S]. `num_top` is capped at the vocabulary size.
    Return ids [S, 1 + num_top] int32, log-probabilities [S, 1 + num_top] float32, and ranks [S] int32. Column 0
    contains `token_ids`, and the other columns contain the top tokens in descending order of `token_keys`. A rank is
    the position of the token in the order of `token_keys`, starting at 1.
    """
    if num_top == 0:
        logprobs, ranks = token_logprobs(logits, token_ids, temperatures)
        return token_ids.int().unsqueeze(1), logprobs.unsqueeze(1), ranks
    logits, token_ids = divided(logits, temperatures), token_ids.unsqueeze(1).long()
    keys = token_keys(logits, torch.arange(logits.shape[1], device=logits.device))
    ranks = (keys > keys.gather(1, token_ids)).sum(-1) + 1
    top_ids = ~keys.topk(min(num_top, keys.shape[1])).values & 0xFFFFFFFF  # a key's low word is ~id
    ids = torch.cat((token_ids, top_ids), 1)
    return ids.int(), gather_logprobs(logits, ids), ranks.int()


@operation
def gather_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [S, n] float32 of `ids` [S, n]. `logits` is [S, vocabulary] float32."""
    return logits.log_softmax(-1).gather(1, ids)


def divided(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Convert the logits [S, vocabulary] to float32. Divide the logits by the temperatures [S], if given."""
    return logits.float() if temperatures is None else logits.float() / temperatures.unsqueeze(1)

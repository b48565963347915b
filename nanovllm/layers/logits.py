"""What sampling parameters do to logits, as vLLM defines it and in this order: biases, and stop ids that come too
early; penalties; allowed ids and bad words; temperature; min-p; top-k; top-p. And log-probabilities, which are those of
the model's own logits.

Here is the plain definition of each step, and kernels/ has the fast one. kernels/sampling_columns.py declares the
parameters. `register_filter` adds a filter from outside.

Where ranks share the vocabulary, each of them has its own shard of every row's logits, and whole rows only where a
filter needs them; for all other rows the ranks only compare their best scores.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.kernels import triton_ops
from nanovllm.kernels.sampling_columns import COLUMNS, MAX_CUSTOM_COLUMNS, WIDTH, Column, column_index
from nanovllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES

MAX_PENALTY_PROGRAMS = 128  # that count tokens at a time; each needs an integer for every token id


def column(params, name: str):
    """A view of one column of `params` [S, WIDTH] int32, on the host or the device; float32 if the column is."""
    i = column_index(name)
    if COLUMNS[i].dtype is int:
        return params[:, i]
    return params.view(np.float32 if isinstance(params, np.ndarray) else torch.float32)[:, i]


def seeds(params):
    """The seeds of the noise, low and high word [S, 2]: a view of `params`."""
    return params[:, WIDTH - 2 :]


def mask_width(vocab_size: int) -> int:
    """int32 words that hold a bit for each token id."""
    return -(-vocab_size // 32)


class SamplingRows(NamedTuple):
    """Sampling parameters of S rows and the token ids of their sequences, which lie in blocks like keys and values.

    So a cached prefix brings its token ids along, and a preempted sequence writes them again.
    """

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32, into the tables of all requests:
    bias_ids: torch.Tensor  # [requests, MAX_BIASES] int32: num_biases of a request's own, then its num_stops stop ids
    biases: torch.Tensor  # [requests, MAX_BIASES] float32, -inf for stop ids
    allowed_masks: torch.Tensor  # [requests, ceil(vocabulary / 32)] int32: a bit for each token id, if has_allowed_ids
    bad_words: torch.Tensor  # [requests, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32: ids with -1 in front; num_bad_words
    token_ids: torch.Tensor  # [blocks, block_size] int32
    block_tables: torch.Tensor  # [S, W] int32
    positions: torch.Tensor  # [S] int32, of the last token
    # scratch memory of kernels, which is all zeros between two of them
    token_counts: torch.Tensor  # [MAX_PENALTY_PROGRAMS, vocabulary] int32
    num_finished_programs: torch.Tensor  # [requests] int32


class NewRequests(Protocol):
    """The part of a prefill Batch that goes to the RequestTable; int32. Slots are positions in flattened tables."""

    req_indices: torch.Tensor  # [S]
    params: torch.Tensor  # [S, WIDTH]
    bias_slots: torch.Tensor  # [N]
    bias_ids: torch.Tensor  # [N]
    bias_bits: torch.Tensor  # [N], of float32 numbers
    allowed_indices: torch.Tensor  # [M], request indices
    allowed_masks: torch.Tensor  # [M, ceil(vocabulary / 32)]
    bad_word_slots: torch.Tensor  # [K]
    bad_words: torch.Tensor  # [K, MAX_BAD_WORD_TOKENS]


class RequestTable:
    """Sampling parameters of all running requests, on the device by request index. The prefill step that samples a
    request's first token writes them.

    The row after the last request's is for padding rows: greedy, and nothing else.
    """

    def __init__(self, num_requests: int, vocab_size: int, device: torch.device):
        self.params = torch.zeros(num_requests + 1, WIDTH, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.int32, device=device)
        self.biases = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.float32, device=device)
        self.allowed_masks = torch.zeros(num_requests + 1, mask_width(vocab_size), dtype=torch.int32, device=device)
        bad_words = num_requests + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        self.bad_words = torch.zeros(bad_words, dtype=torch.int32, device=device)
        num_programs = min(num_requests, MAX_PENALTY_PROGRAMS)
        self.token_counts = torch.zeros(num_programs, vocab_size, dtype=torch.int32, device=device)
        self.num_finished_programs = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def write(self, new: NewRequests) -> None:
        self.params[new.req_indices] = new.params
        self.bias_ids.view(-1)[new.bias_slots] = new.bias_ids
        self.biases.view(-1)[new.bias_slots] = new.bias_bits.view(torch.float32)
        if len(new.allowed_indices):
            self.allowed_masks[new.allowed_indices] = new.allowed_masks
        if len(new.bad_word_slots):
            self.bad_words.flatten(0, 1)[new.bad_word_slots] = new.bad_words

    def rows(
        self, req_indices: torch.Tensor, token_ids: torch.Tensor, block_tables: torch.Tensor, positions: torch.Tensor
    ) -> SamplingRows:
        """The rows of `req_indices` [S]; the other arguments are fields of the result."""
        params = self.params.index_select(0, req_indices)
        tables = self.bias_ids, self.biases, self.allowed_masks, self.bad_words
        scratch = self.token_counts, self.num_finished_programs
        return SamplingRows(params, req_indices, *tables, token_ids, block_tables, positions, *scratch)


CustomFilter = Callable[[torch.Tensor, torch.Tensor], None]
CUSTOM_FILTERS: dict[str, CustomFilter] = {}


def register_filter(name: str, apply: CustomFilter, default: float = 0.0) -> None:
    """Add a filter to all engines of this process that are made afterwards; they must have one rank.

    `apply(logits [S, vocabulary], values [S] float32)` edits logits in place after penalties and before temperature.
    The values are those of the attribute `name` of each request's SamplingParams (a subclass that has it as a field),
    or `default` where there is none. CUDA graphs capture the call, so it must not wait for the device.

    ValueError for the name of a parameter that exists, or where all columns are taken.
    """
    if any(known.name == name for known in COLUMNS):
        raise ValueError(f"filter {name!r}: there is a sampling parameter of this name")
    if len(CUSTOM_FILTERS) == MAX_CUSTOM_COLUMNS:
        raise ValueError(f"filter {name!r}: {MAX_CUSTOM_COLUMNS} filters are registered, and there cannot be more")
    COLUMNS.append(Column(name, float, lambda request: getattr(request.params, name, default)))
    CUSTOM_FILTERS[name] = apply


def apply_custom_filters(logits: torch.Tensor, params: torch.Tensor) -> None:
    for name, apply in CUSTOM_FILTERS.items():
        apply(logits, column(params, name))


def penalize(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Add biases, apply penalties and ban tokens: edits logits [S, vocabulary] in place, in their dtype.

    As vLLM defines it: the repetition penalty divides positive logits and multiplies others, for tokens of the prompt
    and the output (so does transformers'); frequency and presence penalties count tokens of the output alone. Ids that
    are not allowed get -inf; so does the last token of a bad word if the output ends with the word's other tokens.
    """
    if (ops := triton_ops(logits)) is not None:
        ops.penalize(logits, rows)
        return
    edits = torch.stack([rows.params[:, i] for i, known in enumerate(COLUMNS) if known.edits_logits], 1)
    for i in edits.any(1).nonzero().flatten().tolist():
        _penalize_row(logits[i], rows, i)


def _penalize_row(x: torch.Tensor, rows: SamplingRows, i: int) -> None:
    get = lambda name: column(rows.params, name)[i].item()
    request, num_tokens = rows.req_indices[i], int(rows.positions[i]) + 1
    token_ids = rows.token_ids[rows.block_tables[i]].flatten()[:num_tokens]
    output_ids = token_ids[get("num_prompt_tokens") :]
    num_biases = get("num_biases") + (get("num_stops") if num_tokens < get("min_len") else 0)
    x[:] = x.float().index_add(0, rows.bias_ids[request, :num_biases], rows.biases[request, :num_biases])
    if get("is_penalized"):
        y, repetition = x.float(), get("repetition_penalty")
        seen = token_ids.bincount(minlength=len(x)) > 0
        counts = output_ids.bincount(minlength=len(x)).float()
        y = y.where(~seen, torch.where(y > 0, y / repetition, y * repetition))
        x[:] = y - get("frequency_penalty") * counts - get("presence_penalty") * (counts > 0).float()
    if get("has_allowed_ids"):
        bits = rows.allowed_masks[request].unsqueeze(1) >> torch.arange(32, device=x.device) & 1
        x[bits.flatten()[: len(x)] == 0] = -torch.inf
    if num_bad_words := get("num_bad_words"):
        words = rows.bad_words[request, :num_bad_words]
        recent = output_ids[-(MAX_BAD_WORD_TOKENS - 1) :]
        recent = torch.nn.functional.pad(recent, (MAX_BAD_WORD_TOKENS - 1 - len(recent), 0), value=-2)  # equals no id
        begun = ((words[:, :-1] < 0) | (words[:, :-1] == recent)).all(1)
        x[words[begun, -1].long()] = -torch.inf


def token_keys(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that order tokens by likelihood: a larger logit has a larger key, and among equals a lower id has.

    `logits` are float32.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)  # integers in the order of the floats
    return (order.long() << 32) | (~token_ids.long() & 0xFFFFFFFF)


_LAST = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu"), torch.tensor(2**31 - 1, device="cpu")
KEEPS_ALL = token_keys(*_LAST).item()  # no token has a smaller key


def logit_cutoffs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The smallest key [S] int64 that min-p, top-k and top-p keep; KEEPS_ALL for greedy rows, and rows without filters.

    In descending order of `token_keys`, top-k keeps the first k of the tokens that min-p left. Of these, top-p keeps
    the shortest prefix that has its share of the probability.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.logit_cutoffs(logits, rows)
    temperature, top_k, top_p, min_p = (column(rows.params, x) for x in ("temperature", "top_k", "top_p", "min_p"))
    out = torch.full((len(logits),), KEEPS_ALL, dtype=torch.int64, device=logits.device)
    filtered = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(-1)
    if not len(filtered):
        return out
    temperature, top_k, top_p, min_p = (x[filtered].unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    ranked, ids = logits[filtered].float().sort(dim=-1, descending=True, stable=True)
    kept = ranked >= ranked[:, :1] + temperature * min_p.log()
    kept &= (torch.arange(ranked.shape[1], device=logits.device) < top_k) | (top_k <= 0)
    mass = ((ranked - ranked[:, :1]) / temperature).exp().double() * kept
    up_to = mass.cumsum(-1)
    bound = top_p * up_to[:, -1:].float()  # in float32, where 0.1 of 1,000 equal tokens is 100 of them
    kept &= (up_to - mass < bound) | (top_p >= 1)
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1  # the tokens that are kept come first
    out[filtered] = token_keys(ranked.gather(1, last), ids.gather(1, last)).squeeze(1)
    return out


def log_probabilities(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of `token_ids` [S] and of the `num_top` most likely tokens (all, if there are fewer).

    Returns ids and log-probabilities [S, 1 + num_top], the top ones in descending order of `token_keys`; and the ranks
    [S] of `token_ids` in that order, from 1.
    """
    logits, token_ids = logits.float(), token_ids.unsqueeze(1).long()
    keys = token_keys(logits, torch.arange(logits.shape[1], device=logits.device))
    ranks = (keys > keys.gather(1, token_ids)).sum(-1) + 1
    ids = torch.cat((token_ids, ~keys.topk(min(num_top, keys.shape[1])).values & 0xFFFFFFFF), 1)
    return ids.int(), logits.log_softmax(-1).gather(1, ids), ranks.int()

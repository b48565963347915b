"""What sampling parameters do to logits, as vLLM defines it.

The order is: logit biases, and stop ids that min_tokens bans; penalties; allowed ids (of a request, or of a structured
output after its last token) and bad words; the filters of `register_filter`; temperature; min-p; top-k; top-p. Then
layers/sampler.py draws a token. Log-probabilities are those of the model's own logits, before all of this.

The functions here are the definitions in plain PyTorch; on CUDA, `penalize` and `logit_cutoffs` call Triton kernels.
kernels/sampling_columns.py declares the parameters.

Each of several ranks computes the logits of its own range of the vocabulary. Only requests with min-p, top-k or top-p
need complete rows; all other edits are of single tokens, so each rank makes them in its own range. Each rank draws from
its own range, and the best draw of all ranks is taken.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.kernels import triton_ops
from nanovllm.kernels.sampling_columns import COLUMNS, EDITS, FILTERS, MAX_CUSTOM_COLUMNS, WIDTH, Column, column_index
from nanovllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES

MAX_PENALTY_PROGRAMS = 128  # programs of the penalty kernel; each has a count for every token id in scratch memory


def column(params, name: str):
    """A view [S] of a column of `params` [S, WIDTH] int32, NumPy array or tensor; float32 if the column has floats."""
    i = column_index(name)
    if COLUMNS[i].dtype is int:
        return params[:, i]
    return params.view(np.float32 if isinstance(params, np.ndarray) else torch.float32)[:, i]


def seeds(params):
    """The seeds of the sampling noise [S, 2], low and high word: a view of the last two columns of `params`."""
    return params[:, WIDTH - 2 :]


def mask_width(vocab_size: int) -> int:
    """The number of int32 words that hold one bit for each token id."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """[mask_width] int32: the bits of these token ids are set."""
    bits = np.zeros(32 * mask_width(vocab_size), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class SamplingRows(NamedTuple):
    """What the logits of S rows are edited by: one row for each sequence that is to get a token.

    Token ids are cached in blocks, like keys and values and with the same block tables. So penalties find the ids of a
    cached prefix there, and a preempted sequence writes its ids again when it is recomputed.
    """

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32: the rows' indices in the next four, which are tables of all requests
    bias_ids: torch.Tensor  # [requests, MAX_BIASES] int32: `num_biases` ids of logit_bias, then `num_stops` stop ids
    biases: torch.Tensor  # [requests, MAX_BIASES] float32, -inf for stop ids
    allowed_masks: torch.Tensor  # [requests, ceil(vocabulary / 32)] int32: bits of token ids, valid if has_allowed_ids
    bad_words: torch.Tensor  # [requests, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32: `num_bad_words`, padded left by -1
    token_ids: torch.Tensor  # [blocks, block_size] int32
    block_tables: torch.Tensor  # [S, W] int32
    positions: torch.Tensor  # [S] int32, of the last token
    # scratch memory of kernels, all zeros before and after each of them
    token_counts: torch.Tensor  # [MAX_PENALTY_PROGRAMS, vocabulary] int32, of `penalize`
    num_finished_programs: torch.Tensor  # [requests] int32, of `logit_cutoffs`


class NewRequests(Protocol):
    """The part of a Batch that `RequestTable.write` copies; all are int32.

    `*_slots` are indices into a table whose first two dimensions are flattened. Steps without chunks of prompts have
    nothing but masks.
    """

    new_req_indices: torch.Tensor  # [R]
    params: torch.Tensor  # [R, WIDTH]; None without chunks
    bias_slots: torch.Tensor  # [N]
    bias_ids: torch.Tensor  # [N]
    bias_bits: torch.Tensor  # [N], float32 numbers as their bits
    mask_indices: torch.Tensor  # [M], request indices
    masks: torch.Tensor  # [M, ceil(vocabulary / 32)]
    bad_word_slots: torch.Tensor  # [K]
    bad_words: torch.Tensor  # [K, MAX_BAD_WORD_TOKENS]


class RequestTable:
    """Sampling parameters of all running requests on the device; a request's row in each tensor is its request index.

    The step that samples a request's first token writes its rows. One more row, the last, is for the padding of CUDA
    graphs; it stays zero, which means greedy sampling and no edits.
    """

    def __init__(self, num_requests: int, vocab_size: int, device: torch.device):
        self.params = torch.zeros(num_requests + 1, WIDTH, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.int32, device=device)
        self.biases = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.float32, device=device)
        self.allowed_masks = torch.zeros(num_requests + 1, mask_width(vocab_size), dtype=torch.int32, device=device)
        bad_words_shape = num_requests + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        self.bad_words = torch.zeros(bad_words_shape, dtype=torch.int32, device=device)
        num_programs = min(num_requests, MAX_PENALTY_PROGRAMS)
        self.token_counts = torch.zeros(num_programs, vocab_size, dtype=torch.int32, device=device)
        self.num_finished_programs = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def write(self, new: NewRequests) -> None:
        if len(new.mask_indices):
            self.allowed_masks[new.mask_indices] = new.masks
        if new.params is None or not len(new.params):
            return
        self.params[new.new_req_indices] = new.params
        self.bias_ids.view(-1)[new.bias_slots] = new.bias_ids
        self.biases.view(-1)[new.bias_slots] = new.bias_bits.view(torch.float32)
        if len(new.bad_word_slots):
            self.bad_words.flatten(0, 1)[new.bad_word_slots] = new.bad_words

    def rows(
        self, req_indices: torch.Tensor, token_ids: torch.Tensor, block_tables: torch.Tensor, positions: torch.Tensor
    ) -> SamplingRows:
        """The rows of requests `req_indices` [S]; the other arguments become fields of the result."""
        params = self.params.index_select(0, req_indices)
        tables = self.bias_ids, self.biases, self.allowed_masks, self.bad_words
        scratch = self.token_counts, self.num_finished_programs
        return SamplingRows(params, req_indices, *tables, token_ids, block_tables, positions, *scratch)


CustomFilter = Callable[[torch.Tensor, torch.Tensor], None]
CUSTOM_FILTERS: dict[str, CustomFilter] = {}


def register_filter(name: str, apply: CustomFilter, default: float = 0.0) -> None:
    """Add a filter to all engines that this process makes afterwards; they must have one rank.

    `apply(logits [S, vocabulary], values [S] float32)` edits logits in place after penalties and before temperature.
    A value is the attribute `name` of the request's SamplingParams (of a subclass that has this field), or `default` if
    there is none. CUDA graphs capture the call, so it must not synchronize with the host.

    ValueError if a parameter of this name exists, or if MAX_CUSTOM_COLUMNS filters are registered.
    """
    if any(known.name == name for known in COLUMNS):
        raise ValueError(f"filter {name!r}: there is a sampling parameter of this name")
    if len(CUSTOM_FILTERS) == MAX_CUSTOM_COLUMNS:
        raise ValueError(f"filter {name!r}: {MAX_CUSTOM_COLUMNS} filters are registered, and there cannot be more")
    COLUMNS.append(Column(name, float, lambda request: getattr(request.params, name, default)))
    CUSTOM_FILTERS[name] = apply


def apply_custom_filters(filters: dict[str, CustomFilter], logits: torch.Tensor, params: torch.Tensor) -> None:
    for name, apply in filters.items():
        apply(logits, column(params, name))


def penalize(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Add biases, apply penalties and ban tokens: edits logits [S, vocabulary] in place, in their dtype.

    As in vLLM and transformers, the repetition penalty divides positive logits and multiplies others, for tokens of the
    prompt and the output. As in vLLM, frequency and presence penalties count tokens of the output alone. Ids that are
    not allowed get -inf; so does the last token of a bad word if the output ends with the word's other tokens.
    """
    if (ops := triton_ops(logits)) is not None:
        ops.penalize(logits, rows)
        return
    edits = rows.params[:, EDITS]
    for row in edits.any(1).nonzero().flatten().tolist() if edits.any() else ():
        _penalize_row(logits[row], rows, row)
    if (has_mask := column(rows.params, "has_allowed_ids")).any():
        masked = has_mask.nonzero().flatten()
        masks = rows.allowed_masks[rows.req_indices[masked]].view(torch.uint8).unsqueeze(-1)
        is_allowed = (masks & (1 << torch.arange(8, device=masks.device)).to(torch.uint8)).flatten(1).bool()
        logits[masked] = logits[masked].where(is_allowed[:, : logits.shape[1]], -torch.inf)


def _penalize_row(logits: torch.Tensor, rows: SamplingRows, row: int) -> None:
    """`penalize` for the logits [vocabulary] of one row, without the mask of allowed ids."""
    param = lambda name: column(rows.params, name)[row].item()
    req_index, num_tokens = rows.req_indices[row], int(rows.positions[row]) + 1
    token_ids = rows.token_ids[rows.block_tables[row]].flatten()[:num_tokens]
    output_ids = token_ids[param("num_prompt_tokens") :]

    # stop ids follow the ids of logit_bias, with biases of -inf
    num_biases = param("num_biases") + (param("num_stops") if num_tokens < param("min_len") else 0)
    logits[:] = logits.float().index_add(0, rows.bias_ids[req_index, :num_biases], rows.biases[req_index, :num_biases])

    if param("is_penalized"):
        x, repetition = logits.float(), param("repetition_penalty")
        is_seen = token_ids.bincount(minlength=len(x)) > 0
        counts = output_ids.bincount(minlength=len(x)).float()
        x = x.where(~is_seen, torch.where(x > 0, x / repetition, x * repetition))
        logits[:] = x - param("frequency_penalty") * counts - param("presence_penalty") * (counts > 0).float()

    if num_bad_words := param("num_bad_words"):
        words = rows.bad_words[req_index, :num_bad_words]
        starts, last_ids = words[:, :-1], words[:, -1]
        recent = output_ids[-starts.shape[1] :]
        recent = torch.nn.functional.pad(recent, (starts.shape[1] - len(recent), 0), value=-2)  # -2 equals no id
        is_next = ((starts == -1) | (starts == recent)).all(1)  # the output ends with all but the last id of the word
        logits[last_ids[is_next].long()] = -torch.inf


def token_keys(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that order tokens by likelihood: a larger logit has a larger key, and of equal logits the lower id.

    `logits` are float32. The high word of a key has the order of the logits; the low word is ~token_id.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which has other bits and must have an equal key
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as int32 in the order of the floats: negative ones have theirs reversed
    return (order.long() << 32) | (~token_ids.long() & 0xFFFFFFFF)


_LEAST_LIKELY = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu"), torch.tensor(2**31 - 1, device="cpu")
_NO_FILTERS = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32, device="cpu").view(torch.int32)  # top_p, min_p, top_k
KEEPS_ALL = token_keys(*_LEAST_LIKELY).item()  # a cutoff below which no token's key can be


def logit_cutoffs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The smallest `token_keys` [S] int64 that min-p, top-k and top-p keep of each row.

    Tokens are taken in descending order of their keys. min-p keeps the tokens that are likely enough; of these, top-k
    keeps the first k; of these, top-p keeps the fewest whose probabilities, relative to the sum of what top-k kept,
    reach top_p. Greedy rows and rows without these filters get KEEPS_ALL.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.logit_cutoffs(logits, rows)
    out = torch.full((len(logits),), KEEPS_ALL, dtype=torch.int64, device=logits.device)
    if not (rows.params[:, FILTERS] != _NO_FILTERS.to(logits.device)).any():
        return out
    temperature, top_k, top_p, min_p = (column(rows.params, x) for x in ("temperature", "top_k", "top_p", "min_p"))
    filtered = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(-1)
    temperature, top_k, top_p, min_p = (x[filtered].unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    ranked, ids = logits[filtered].float().sort(dim=-1, descending=True, stable=True)
    kept = ranked >= ranked[:, :1] + temperature * min_p.log()
    kept &= (torch.arange(ranked.shape[1], device=logits.device) < top_k) | (top_k <= 0)
    weights = ((ranked - ranked[:, :1]) / temperature).exp().double() * kept  # probabilities times a constant
    sums = weights.cumsum(-1)
    # float32 rounds top_p=0.1 of 1,000 equal tokens to 100; in float64 it is a little more, and would keep 101
    needed = top_p * sums[:, -1:].float()
    kept &= (sums - weights < needed) | (top_p >= 1)  # the tokens before it do not reach top_p
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1  # the tokens that are kept come first
    out[filtered] = token_keys(ranked.gather(1, last), ids.gather(1, last)).squeeze(1)
    return out

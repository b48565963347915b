"""What a request asks of its logits, as vLLM defines it and in this order: biases and stop ids that come too early,
penalties, allowed ids and bad words, temperature, min-p, top-k, top-p. And log-probabilities, which are of the logits
as the model gives them.

A new filter takes a column in FIELDS (and in kernels/asked.py), its value in engine/batch.py, its definition here, and
a kernel.

Where the vocabulary is cut over ranks, each of them has its own part of every row, and the whole of those that are
filtered; of a plain row the ranks compare no more than their best scores.
"""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.kernels import triton_ops
from nanovllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES

REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
EDITS = ("is_penalized", "num_biases", "num_stops", "has_allowed_ids", "num_bad_words")  # 0: do nothing
FIELDS = (*REALS, "top_k", "num_prompt_tokens", "min_len", *EDITS)
WIDTH = 16  # FIELDS, and the two words of the noise's seed
PROGRAMS = 128  # that count tokens at a time


def column(params, name: str):
    """A view of one of FIELDS in `params` [S, WIDTH] int32, on the host or the device."""
    i = FIELDS.index(name)
    if i >= len(REALS):
        return params[:, i]
    return params.view(np.float32 if isinstance(params, np.ndarray) else torch.float32)[:, i]


def seeds(params):
    """A view of the seeds, low and high word [S, 2]."""
    return params[:, WIDTH - 2 :]


def mask_width(vocab_size: int) -> int:
    """int32 words that hold a bit for each token id."""
    return -(-vocab_size // 32)


class Rows(NamedTuple):
    """What the requests of S rows ask, and their tokens, which lie in blocks as their keys do.

    So whoever finds a prefix finds its token ids, and what is computed again after a preemption is written again.
    """

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32
    bias_ids: torch.Tensor  # [requests, MAX_BIASES] int32: num_biases of a request's own, then its num_stops stop ids
    biases: torch.Tensor  # [requests, MAX_BIASES] float32, -inf for stop ids
    allowed_ids: torch.Tensor  # [requests, ceil(vocabulary / 32)] int32: a bit for each token id, where has_allowed_ids
    bad_words: torch.Tensor  # [requests, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32: ids with -1 in front; num_bad_words
    token_ids: torch.Tensor  # [blocks, block_size] int32
    block_tables: torch.Tensor  # [S, W] int32
    positions: torch.Tensor  # [S] int32, of the last token
    counts: torch.Tensor  # [PROGRAMS, vocabulary] int32 and
    arrivals: torch.Tensor  # [requests] int32: zeros, which kernels leave as they find them


class RequestTable:
    """What each request asks, on the device by request index; written by the step that samples from its prompt.

    The row past the last request's is that of rows which stand for nobody: greedy, and nothing else.
    """

    def __init__(self, num_requests: int, vocab_size: int, device: torch.device):
        self.params = torch.zeros(num_requests + 1, WIDTH, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.int32, device=device)
        self.biases = torch.zeros(num_requests + 1, MAX_BIASES, dtype=torch.float32, device=device)
        self.allowed_ids = torch.zeros(num_requests + 1, mask_width(vocab_size), dtype=torch.int32, device=device)
        bad_words = num_requests + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        self.bad_words = torch.zeros(bad_words, dtype=torch.int32, device=device)
        self.counts = torch.zeros(min(num_requests, PROGRAMS), vocab_size, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def write(
        self, req_indices, params, bias_slots, bias_ids, bias_bits, allowed_slots, allowed_ids, word_slots, bad_words
    ) -> None:
        """Params [S, WIDTH] and masks of allowed ids by request index; ids [N] and float32 bits of biases, and bad
        words [K, MAX_BAD_WORD_TOKENS], by their place in the flat table. All are int32.
        """
        self.params[req_indices] = params
        self.bias_ids.view(-1)[bias_slots] = bias_ids
        self.biases.view(-1)[bias_slots] = bias_bits.view(torch.float32)
        if len(allowed_slots):
            self.allowed_ids[allowed_slots] = allowed_ids
        if len(word_slots):
            self.bad_words.flatten(0, 1)[word_slots] = bad_words

    def rows(self, req_indices: torch.Tensor, *tokens: torch.Tensor) -> Rows:
        params = self.params.index_select(0, req_indices)
        tables = self.bias_ids, self.biases, self.allowed_ids, self.bad_words
        return Rows(params, req_indices, *tables, *tokens, self.counts, self.arrivals)


def penalize(logits: torch.Tensor, rows: Rows) -> None:
    """Edit logits [S, vocabulary] in place as EDITS say, so that the results are rounded to their dtype.

    As vLLM defines it: the repetition penalty divides what is positive and multiplies what is not, for tokens of the
    prompt and the output (so does transformers'); frequency and presence penalties count tokens of the output alone.
    Ids that are not allowed get -inf; so does the last token of a bad word whose other tokens end the output.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.penalize(logits, rows)
    edits = torch.stack([column(rows.params, name) for name in EDITS], 1)
    for i in edits.any(1).nonzero().flatten().tolist():
        _penalize_row(logits[i], rows, i)


def _penalize_row(x: torch.Tensor, rows: Rows, i: int) -> None:
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
        bits = rows.allowed_ids[request].unsqueeze(1) >> torch.arange(32, device=x.device) & 1
        x[bits.flatten()[: len(x)] == 0] = -torch.inf
    if num_bad_words := get("num_bad_words"):
        words = rows.bad_words[request, :num_bad_words]
        recent = output_ids[-(MAX_BAD_WORD_TOKENS - 1) :]
        recent = torch.nn.functional.pad(recent, (MAX_BAD_WORD_TOKENS - 1 - len(recent), 0), value=-2)  # equals no id
        begun = ((words[:, :-1] < 0) | (words[:, :-1] == recent)).all(1)
        x[words[begun, -1].long()] = -torch.inf


def token_keys(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 keys of float32 logits and their ids, in the order that says which token is the more likely.

    The larger logit comes first, and among equals the lower id: such a token has the larger key.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)  # integers in the order of the floats
    return (order.long() << 32) | (~token_ids.long() & 0xFFFFFFFF)


_LAST = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu"), torch.tensor(2**31 - 1, device="cpu")
KEEPS_ALL = token_keys(*_LAST).item()  # no token has a smaller key


def logit_cutoffs(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The key [S] int64 of the last token that min-p, top-k and top-p keep; KEEPS_ALL for rows without, and if greedy.

    In the order of `token_keys`, top-k keeps the first k of the tokens that min-p left; of what is left then, top-p
    keeps as few of the first as have its part of the mass.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.logit_cutoffs(logits, rows)
    temperature, top_k, top_p, min_p = (column(rows.params, x) for x in ("temperature", "top_k", "top_p", "min_p"))
    out = torch.full((len(logits),), KEEPS_ALL, dtype=torch.int64, device=logits.device)
    some = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(-1)
    if not len(some):
        return out
    temperature, top_k, top_p, min_p = (x[some].unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    ranked, ids = logits[some].float().sort(dim=-1, descending=True, stable=True)
    kept = ranked >= ranked[:, :1] + temperature * min_p.log()
    kept &= (torch.arange(ranked.shape[1], device=logits.device) < top_k) | (top_k <= 0)
    mass = ((ranked - ranked[:, :1]) / temperature).exp().double() * kept
    up_to = mass.cumsum(-1)
    bound = top_p * up_to[:, -1:].float()  # in float32, where 0.1 of 1,000 equal tokens is 100 of them
    kept &= (up_to - mass < bound) | (top_p >= 1)
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1  # what is kept are the first
    out[some] = token_keys(ranked.gather(1, last), ids.gather(1, last)).squeeze(1)
    return out


def log_probabilities(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Ids and log-probabilities [S, 1 + most] of `chosen` [S] and then of the `most` likely tokens, or of all, in the
    order of `token_keys`; and the ranks [S] of `chosen` in that order, from 1.
    """
    logits, chosen = logits.float(), chosen.unsqueeze(1).long()
    keys = token_keys(logits, torch.arange(logits.shape[1], device=logits.device))
    ranks = (keys > keys.gather(1, chosen)).sum(-1) + 1
    ids = torch.cat((chosen, ~keys.topk(min(most, keys.shape[1])).values & 0xFFFFFFFF), 1)
    return ids.int(), logits.log_softmax(-1).gather(1, ids), ranks.int()

"""What a request asks of its logits besides a temperature, in vLLM's order: biases and stop ids that it must not have yet,
penalties, temperature, min-p, top-k, top-p. And log-probabilities, which are of the logits as the model gives them.

Where the vocabulary is cut over ranks, each of them has its own part of every row, and the whole of those that are filtered;
of a plain row the ranks compare no more than their best scores.
"""
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.kernels import triton_ops

REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FIELDS = (*REALS, "top_k", "is_penalized", "num_prompt_tokens", "min_len", "num_biases", "num_stops")
WIDTH = 16  # FIELDS, two to spare, and the two words of the noise's seed
MOST_BIASES = 512  # of a request, the stop ids included that min_tokens rules out
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


class Rows(NamedTuple):
    """What the requests of S rows ask, and their tokens, which lie in blocks as their keys do.

    So whoever finds a prefix finds its token ids, and what is computed again after a preemption is written again.
    """

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32
    bias_ids: torch.Tensor  # [requests, MOST_BIASES] int32: num_biases of a request's own, then its num_stops stop ids
    biases: torch.Tensor  # [requests, MOST_BIASES] float32, -inf for stop ids
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
        self.bias_ids = torch.zeros(num_requests + 1, MOST_BIASES, dtype=torch.int32, device=device)
        self.biases = torch.zeros(num_requests + 1, MOST_BIASES, dtype=torch.float32, device=device)
        self.counts = torch.zeros(min(num_requests, PROGRAMS), vocab_size, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def write(self, req_indices, params, bias_slots, bias_ids, bias_bits) -> None:
        """Params [S, WIDTH] by request index; ids and float32 bits of biases by their place in the flat table. int32."""
        self.params[req_indices] = params
        self.bias_ids.view(-1)[bias_slots] = bias_ids
        self.biases.view(-1)[bias_slots] = bias_bits.view(torch.float32)

    def rows(self, req_indices: torch.Tensor, *tokens: torch.Tensor) -> Rows:
        params = self.params.index_select(0, req_indices)
        return Rows(params, req_indices, self.bias_ids, self.biases, *tokens, self.counts, self.arrivals)


def penalize(logits: torch.Tensor, rows: Rows) -> None:
    """Bias and penalise logits [S, vocabulary] in place, so that the results are rounded to their dtype.

    As vLLM defines it: the repetition penalty divides what is positive and multiplies what is not, for tokens of the prompt
    and the output (so does transformers'); frequency and presence penalties count tokens of the output alone.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.penalize(logits, rows)
    values = zip(*(column(rows.params, name).tolist() for name in FIELDS[3:] if name != "top_k"), strict=True)
    for i, (presence, frequency, repetition, is_penalized, num_prompt, min_len, num_biases, num_stops) in enumerate(values):
        num_tokens, request = int(rows.positions[i]) + 1, rows.req_indices[i]
        num_biases += num_stops if num_tokens < min_len else 0
        if not is_penalized and not num_biases:
            continue
        logits[i] = logits[i].float().index_add(0, rows.bias_ids[request, :num_biases], rows.biases[request, :num_biases])
        if is_penalized:
            x = logits[i].float()
            token_ids = rows.token_ids[rows.block_tables[i]].flatten()[:num_tokens]
            seen = token_ids.bincount(minlength=len(x)) > 0
            outputs = token_ids[num_prompt:].bincount(minlength=len(x))
            x = x.where(~seen, torch.where(x > 0, x / repetition, x * repetition))
            logits[i] = x - frequency * outputs.float() - presence * (outputs > 0).float()


def thresholds(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The least logit [S] float32 that min-p, top-k and top-p keep, -inf for rows that ask for none or are greedy.

    Top-k keeps all that equal the k-th largest; top-p, of what is left and its mass, all above which lies less than top_p.
    """
    if (ops := triton_ops(logits)) is not None:
        return ops.thresholds(logits, rows)
    temperature, top_k, top_p, min_p = (column(rows.params, x) for x in ("temperature", "top_k", "top_p", "min_p"))
    out = torch.full((len(logits),), -torch.inf, dtype=torch.float32, device=logits.device)
    some = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(-1)
    temperature, top_k, top_p, min_p = (x[some].unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    ranked = logits[some].float().sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, ranked.shape[1]).clamp(max=ranked.shape[1]) - 1
    threshold = (ranked[:, :1] + temperature * min_p.log()).maximum(ranked.gather(1, last.long()))
    mass = ((ranked - ranked[:, :1]) / temperature).exp().double() * (ranked >= threshold)
    up_to = mass.cumsum(-1)
    kept = (up_to - mass < top_p * up_to[:, -1:]) | (top_p >= 1)
    out[some] = threshold.squeeze(1).maximum(ranked.where(kept, torch.inf).amin(-1))
    return out


def log_probabilities(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [S, 1 + most] of `chosen` [S] and, best first, of the most likely tokens."""
    values = logits.float().log_softmax(-1)
    ids = torch.cat((chosen.unsqueeze(1).long(), values.topk(most).indices), 1)
    return ids, values.gather(1, ids)

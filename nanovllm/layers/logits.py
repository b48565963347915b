"""The parameters of sampled rows, and the filters of logits: min-p, top-k and top-p.

The order of all that edits logits, as vLLM defines it, is: logit biases, and stop ids that min_tokens bans; penalties;
allowed ids (of a request, or of a structured output after its last token) and bad words; features that were registered
from outside; temperature; min-p; top-k; top-p. Then layers/sampler.py draws a token. What stands before the registered
features is in features/logit_edits.py. Log-probabilities are those of the model's own logits, before all of this.

kernels/sampling_columns.py declares the parameters.

Each of several ranks computes the logits of its own range of the vocabulary. Only requests with min-p, top-k or top-p
need complete rows; all other edits are of single tokens, so each rank makes them in its own range. Each rank draws from
its own range, and the best draw of all ranks is taken.
"""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.kernels import operation
from nanovllm.kernels.sampling_columns import COLUMNS, FILTERS, WIDTH, column_index

GREEDY_BELOW = 1e-5  # float32 logits cannot be divided by a smaller temperature


def column(params, name: str):
    """A view [S] of a column of `params` [S, WIDTH] int32, NumPy array or tensor; float32 if the column has floats."""
    i = column_index(name)
    if COLUMNS[i].dtype is int:
        return params[:, i]
    return params.view(np.float32 if isinstance(params, np.ndarray) else torch.float32)[:, i]


def seeds(params):
    """The seeds of the sampling noise [S, 2], low and high word: a view of the last two columns of `params`."""
    return params[:, WIDTH - 2 :]


class SamplingRows(NamedTuple):
    """What is known of the S sequences that are to get a token.

    Token ids are cached in blocks, like keys and values and with the same block tables. So penalties find the ids of a
    cached prefix there, and a preempted sequence writes its ids again when it is recomputed.
    """

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S] int32, of the last token
    block_tables: torch.Tensor  # [S, W] int32
    token_ids: torch.Tensor  # [blocks, block_size] int32
    num_finished_programs: torch.Tensor  # [S or more] int32, scratch of a kernel: zeros before and after it

    def column(self, name: str) -> torch.Tensor:
        """[S]: a parameter of the rows; float32 if it is not declared as an integer."""
        return column(self.params, name)


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


@operation
def logit_cutoffs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The smallest `token_keys` [S] int64 that min-p, top-k and top-p keep of each row.

    Tokens are taken in descending order of their keys. min-p keeps the tokens that are likely enough; of these, top-k
    keeps the first k; of these, top-p keeps the fewest whose probabilities, relative to the sum of what top-k kept,
    reach top_p. Greedy rows and rows without these filters get KEEPS_ALL.
    """
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

"""Samples the next token of each row from its logits, with the filters min-p, top-k and top-p.

Features (features/logit_edits.py) edit the logits first.

Each rank draws a token from its part of the vocabulary, and the token with the highest score is used. Only min-p, top-k
and top-p need complete rows of logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.kernels.sampling.sampling_columns import PHILOX_ROUNDS, column
from nanovllm.utils.tensor_parallel import TensorParallel


class Sampler(nn.Module):
    """Samples with Gumbel noise: `argmax(logits / temperature + noise)` is a draw from `softmax(logits / temperature)`.

    Sampling needs neither a sum over the vocabulary nor a random generator. The noise does not depend on the other
    requests of the batch. Temperature 0 means greedy sampling.
    """

    def __init__(self, tp: TensorParallel = TensorParallel(), first_id: int = 0):
        super().__init__()
        self.tp, self.first_id = tp, first_id

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cutoffs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw token ids [S] int32 from logits [S, shard]. Column 0 of the logits belongs to token `first_id`.

        `temperatures` [S] is float32, and `positions` [S] and `seeds` [S, 2] (by default random) are int32. `cutoffs`
        [S] comes from `logit_cutoffs`: tokens with lower keys are never drawn.
        """
        if seeds is None:
            seeds = torch.randint(-(2**31), 2**31, (len(logits), 2), dtype=torch.int32, device=logits.device)
        if positions is None:
            positions = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        best, token_ids = sample(logits, temperatures, seeds, positions, self.first_id, cutoffs=cutoffs)
        if self.tp.size == 1:
            return token_ids
        return ~self.tp.all_reduce_max(token_keys(best, token_ids)).int()  # among equal scores, the lowest id wins


@operation
def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int = 0,
    cutoffs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row from this rank's shard of the vocabulary. Return scores [S] and ids [S]."""
    scores = logits.float()
    filtered_rows = () if cutoffs is None else (cutoffs > KEEPS_ALL).nonzero().squeeze(-1)
    if len(filtered_rows):
        filtered = scores[filtered_rows]
        keys = token_keys(filtered, torch.arange(filtered.shape[1], device=filtered.device) + first_id)
        filtered = filtered.masked_fill(keys < cutoffs[filtered_rows].unsqueeze(1), -torch.inf)
        scores = scores.index_copy(0, filtered_rows, filtered)
    if (is_drawn := temperatures > 0).any():
        scores = scores / temperatures.where(is_drawn, 1).unsqueeze(1)
        scores = add_noise(scores, is_drawn, seeds, positions, first_id)
    best, index = scores.max(-1)
    return best, index.int() + first_id


# -- noise -------------------------------------------------------------------------------------------------------------


_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


@operation
def philox(c0, c1, c2, c3, k0, k1, rounds: int = PHILOX_ROUNDS) -> tuple[torch.Tensor, ...]:
    """Compute Philox4x32 (Salmon et al., SC 2011) from a counter c0 to c3 and a key k0, k1: int64, below 2^32."""
    for _ in range(rounds):
        x, y = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # modulo 2^64
        c0, c2 = (y >> 32 ^ c1 ^ k0) & _WORD, (x >> 32 ^ c3 ^ k1) & _WORD
        c1, c3 = y, x  # masked by the round that combines them, or at the end
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise [N, 4] float32 for the token ids 4 * q to 4 * q + 3 of each `q` in `quads` [N].

    The noise depends only on the seed (Philox's key), and the position and the token id (Philox's counter).
    """
    zero = torch.zeros_like(quads)
    words = philox(quads, positions.long(), zero, zero, *(seeds.long() & _WORD).unbind(-1))
    # in (0, 1); small numbers, which become large noise, are not rounded
    uniform = torch.stack(words, dim=-1).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def add_noise(
    scores: torch.Tensor, is_drawn: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int
) -> torch.Tensor:
    """Add noise to the `scores` [S, n] of the tokens that can win, except in greedy rows.

    Noise is between -2.9 and 22.9, so a token more than 26 below the best score can't win.
    """
    num_before = first_id % 4
    padding = num_before, -(num_before + scores.shape[1]) % 4
    noisy = F.pad(scores, padding, value=-torch.inf).unflatten(1, (-1, 4))  # [S, quads, 4]
    best = noisy.amax(2)  # [S, quads]
    may_win = (best >= best.amax(1, keepdim=True) - 26) & is_drawn.unsqueeze(1)
    rows, quads = may_win.nonzero().unbind(1)
    noisy[rows, quads] += gumbel_noise(seeds[rows], positions[rows], quads + first_id // 4)
    return noisy.flatten(1)[:, num_before : num_before + scores.shape[1]]


# -- filters -----------------------------------------------------------------------------------------------------------


def token_keys(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, which order tokens by float32 logit. If logits are equal, a lower id has a higher key.

    The high word of a key orders tokens by logit. The low word is `~token_id`.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which must have the same key
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)  # int32 in the order of the floats: bits of negative numbers are inverted
    return (order.long() << 32) | (~token_ids.long() & 0xFFFFFFFF)


_LEAST_LIKELY = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu"), torch.tensor(2**31 - 1, device="cpu")
KEEPS_ALL = token_keys(*_LEAST_LIKELY).item()  # no token's key is below this cutoff


class SamplingRows(NamedTuple):
    """The rows of the S sequences that get a token in this step. Token ids are cached in the blocks of their keys."""

    params: torch.Tensor  # [S, WIDTH] int32
    req_indices: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S] int32, the position of the last token
    block_tables: torch.Tensor  # [S, W] int32
    token_ids: torch.Tensor  # [blocks, block_size] int32
    num_finished_programs: torch.Tensor  # [S or more] int32, a kernel's scratch: zeros before and after the kernel

    def column(self, name: str) -> torch.Tensor:
        """Return a parameter's values [S], one for each row.

        Values are float32, or integers if the parameter is declared as an integer.
        """
        return column(self.params, name)


@operation
def logit_cutoffs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return cutoffs [S] int64: each row's smallest key (see `token_keys`) that passes min-p, top-k and top-p.

    Tokens are filtered in descending order of their keys. First, min-p drops unlikely tokens. Of the remaining tokens,
    top-k keeps the first k. Then top-p renormalizes the probabilities, and keeps tokens until their sum reaches
    `top_p`. Greedy rows and rows without filters get KEEPS_ALL.
    """
    out = torch.full((len(logits),), KEEPS_ALL, dtype=torch.int64, device=logits.device)
    temperature, top_k, top_p, min_p = (column(rows.params, x) for x in ("temperature", "top_k", "top_p", "min_p"))
    rows_to_filter = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(-1)
    if not len(rows_to_filter):
        return out
    temperature, top_k, top_p, min_p = (x[rows_to_filter].unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    ranked, ids = logits[rows_to_filter].float().sort(dim=-1, descending=True, stable=True)
    is_kept = ranked >= ranked[:, :1] + temperature * min_p.log()
    is_kept &= (torch.arange(ranked.shape[1], device=logits.device) < top_k) | (top_k <= 0)
    weights = ((ranked - ranked[:, :1]) / temperature).exp().double() * is_kept  # probabilities times a constant
    sums = weights.cumsum(-1)
    # so that top_p = 0.1 keeps 100 of 1,000 equal tokens; in float64, the sum would be slightly above 100
    needed = top_p * sums[:, -1:].float()
    is_kept &= (sums - weights < needed) | (top_p >= 1)  # keep a token if the tokens before it do not reach top_p
    last = is_kept.sum(-1, keepdim=True).clamp(min=1) - 1  # kept tokens come first
    out[rows_to_filter] = token_keys(ranked.gather(1, last), ids.gather(1, last)).squeeze(1)
    return out

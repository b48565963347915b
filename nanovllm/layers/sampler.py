"""The next token of each row: greedy, or drawn by Gumbel-max with stateless noise."""

import torch
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.layers.logits import KEEPS_ALL, token_keys
from nanovllm.utils.tensor_parallel import TensorParallel

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7  # the least that the authors found to pass every test of TestU01's BigCrush


def philox(counter: tuple, key: tuple, rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four words of each counter.

    Counter and key are four and two int64 tensors of values below 2^32, of shapes that broadcast.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(rounds):
        x, y = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high_x, high_y = x >> 32, y >> 32
        if i < 2:  # the words may not have their whole shape yet, and what is the same for all costs little
            c0, c2 = (high_y ^ (c1 ^ k0)) & _WORD, (high_x ^ (c3 ^ k1)) & _WORD
        else:
            c0 = high_y.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
            c2 = high_x.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = y, x  # their upper halves go when a word that they meet, or the result, is masked
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return torch.broadcast_tensors(c0, c1 & _WORD, c2, c3 & _WORD)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, num_ids: int, first_id: int = 0) -> torch.Tensor:
    """[S, num_ids] float32 standard Gumbel noise of the ids from `first_id` on, of (seed, position, token id) alone.

    The seed is Philox's key, (token id // 4, position, 0, 0) its counter and token id % 4 the word that is taken.
    """
    low, high = (seeds.long() & _WORD).unsqueeze(-1).unbind(1)  # [S, 1] each
    c0 = torch.arange(first_id // 4, -(-(first_id + num_ids) // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(c0[:, :1])
    words = philox((c0, positions.long().unsqueeze(1), zero, zero), (low, high))
    bits = torch.stack(words, dim=-1).flatten(1)[:, first_id % 4 :][:, :num_ids]
    # in (0, 1); small values, which make large noise, keep all their digits
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Sampler(nn.Module):
    """argmax(logits / temperature + Gumbel noise) is a draw from softmax(logits / temperature).

    So the draw needs no sum over the vocabulary, no generator and no state, and it is the same wherever the row is
    computed. Temperature 0 is greedy. Ranks that have a part of the vocabulary each compare their best.
    """

    def __init__(self, tp: TensorParallel = TensorParallel(), first_id: int = 0):
        super().__init__()
        self.tp, self.first_id = tp, first_id

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        cutoffs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """logits [S, ids] of those from `first_id` on, temperatures [S], seeds [S, 2], positions [S] -> ids [S] int32.

        No token is drawn whose key is below its row's of `cutoffs` [S] int64, which `logit_cutoffs` made.
        """
        if (ops := triton_ops(logits)) is not None:
            noise = temperatures, seeds, positions, ROUNDS, self.first_id
            best, token_ids = ops.sample(logits, *noise, cutoffs=cutoffs)
        else:
            best, token_ids = self._sample(logits, temperatures, seeds, positions, cutoffs)
        return token_ids if self.tp.size == 1 else self._best_of_ranks(best, token_ids)

    def _best_of_ranks(self, best: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Scores [S] float32 and ids [S] int32 of every rank: the ids of the best, of the lowest among equals."""
        return ~self.tp.max_of_ranks(token_keys(best, token_ids)).int()

    def _sample(self, logits, temperatures, seeds, positions, cutoffs) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.float()
        filtered = () if cutoffs is None else (cutoffs > KEEPS_ALL).nonzero().squeeze(-1)
        if len(filtered):
            kept = scores[filtered]
            keys = token_keys(kept, torch.arange(kept.shape[1], device=kept.device) + self.first_id)
            kept = kept.masked_fill(keys < cutoffs[filtered].unsqueeze(1), -torch.inf)
            scores = scores.index_copy(0, filtered, kept)
        rows = temperatures.nonzero().squeeze(-1)
        if len(rows) == len(scores):
            noise = gumbel_noise(seeds, positions, scores.shape[1], self.first_id)
            scores = scores / temperatures.unsqueeze(1) + noise
        elif len(rows):
            noise = gumbel_noise(seeds[rows], positions[rows], scores.shape[1], self.first_id)
            scores = scores.index_copy(0, rows, scores[rows] / temperatures[rows].unsqueeze(1) + noise)
        best, index = scores.max(-1)
        return best, index.int() + self.first_id

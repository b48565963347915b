"""The next token of each row: greedy, or drawn by Gumbel-max with stateless noise."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.kernels.sampling_columns import PHILOX_ROUNDS
from nanovllm.layers.logits import KEEPS_ALL, token_keys
from nanovllm.utils.tensor_parallel import TensorParallel

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple, key: tuple, rounds: int = PHILOX_ROUNDS) -> tuple[torch.Tensor, ...]:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four words of each counter.

    Counter and key are four and two int64 tensors of values below 2^32, of shapes that broadcast.
    """
    words = *counter, *key
    # NumPy takes a third of PyTorch's time for hundreds of counters, and no more for many
    c0, c1, c2, c3, k0, k1 = (word.numpy() for word in words) if key[0].device.type == "cpu" else words
    for _ in range(rounds):
        x, y = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # modulo 2^64
        c0, c2 = (y >> 32 ^ c1 ^ k0) & _WORD, (x >> 32 ^ c3 ^ k1) & _WORD
        c1, c3 = y, x  # masked later: by the round that combines them, or at the end
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return torch.broadcast_tensors(*map(torch.as_tensor, (c0, c1 & _WORD, c2, c3 & _WORD)))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [N, 4] float32 for the ids 4 * quad to 4 * quad + 3 of each of `quads` [N].

    It depends on (seed, position, token id) alone: the seed is Philox's key, (token id // 4, position, 0, 0) its
    counter, and token id % 4 the index of the word of its output.
    """
    zero = torch.zeros_like(quads)
    words = philox((quads, positions.long(), zero, zero), (seeds.long() & _WORD).unbind(-1))
    # in (0, 1); small values, which become large noise, keep all their digits
    uniform = torch.stack(words, dim=-1).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def add_noise(
    scores: torch.Tensor, is_drawn: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int
) -> torch.Tensor:
    """scores [S, n] of the ids from `first_id` on, plus the noise of those that may become the best of their rows.

    Noise is between -2.9 and 22.9, so most tokens are too far below the best one, and need none. Nor do rows that are
    not drawn.
    """
    num_before = first_id % 4
    padding = num_before, -(num_before + scores.shape[1]) % 4
    noisy = F.pad(scores, padding, value=-torch.inf).unflatten(1, (-1, 4))  # [S, quads, 4]
    best = noisy.amax(2)  # [S, quads]
    may_win = (best >= best.amax(1, keepdim=True) - 26) & is_drawn.unsqueeze(1)
    rows, quads = may_win.nonzero().unbind(1)
    noisy[rows, quads] += gumbel_noise(seeds[rows], positions[rows], quads + first_id // 4)
    return noisy.flatten(1)[:, num_before : num_before + scores.shape[1]]


@operation
def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int = 0,
    cutoffs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Sampler` draws from its own shard: scores and token ids [S]."""
    scores = logits.float()
    filtered = () if cutoffs is None else (cutoffs > KEEPS_ALL).nonzero().squeeze(-1)
    if len(filtered):
        kept = scores[filtered]
        keys = token_keys(kept, torch.arange(kept.shape[1], device=kept.device) + first_id)
        kept = kept.masked_fill(keys < cutoffs[filtered].unsqueeze(1), -torch.inf)
        scores = scores.index_copy(0, filtered, kept)
    if (is_drawn := temperatures > 0).any():
        scores = scores / temperatures.where(is_drawn, 1).unsqueeze(1)
        scores = add_noise(scores, is_drawn, seeds, positions, first_id)
    best, index = scores.max(-1)
    return best, index.int() + first_id


class Sampler(nn.Module):
    """argmax(logits / temperature + Gumbel noise) is a draw from softmax(logits / temperature).

    So a draw needs no sum over the vocabulary, no generator and no state, and its noise does not depend on the batch.
    Temperature 0 is greedy. Where ranks share the vocabulary, each draws from its own shard, and then they compare
    their scores.
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
        """Token ids [S] int32 drawn from logits [S, shard], whose column 0 is the token `first_id`.

        temperatures [S] float32, seeds [S, 2] int32, positions [S] int32. Tokens whose key is below the row's cutoff
        are not drawn; `logit_cutoffs` computes `cutoffs` [S] int64.
        """
        best, token_ids = sample(logits, temperatures, seeds, positions, self.first_id, cutoffs=cutoffs)
        return token_ids if self.tp.size == 1 else self._best_of_ranks(best, token_ids)

    def _best_of_ranks(self, best: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids of the largest scores of all ranks, of equal ones the lowest; the arguments [S] are this rank's."""
        return ~self.tp.all_reduce_max(token_keys(best, token_ids)).int()

"""The next token of each row: greedy, or drawn by Gumbel-max with stateless noise."""
import torch
from torch import nn

from nanovllm.kernels import triton_ops

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


ROUNDS = 7  # the least that the authors found to pass every test of TestU01's BigCrush


def philox(counter: torch.Tensor, key: torch.Tensor, rounds: int = ROUNDS) -> torch.Tensor:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    counter [4, ...] and key [2, ...] to words [4, ...], all int64 tensors of values below 2^32.
    """
    like = (2, *[1] * (key.dim() - 1))
    multipliers, steps = (torch.tensor(x, device=key.device).view(like) for x in (_MULTIPLIERS, _KEY_STEPS))
    even, odd = counter[0::2], counter[1::2]
    for i in range(rounds):
        product = even * multipliers  # 64 bits, the sign bit among them: int64 is what PyTorch has everywhere
        low, high = product & _WORD, product.bitwise_right_shift_(32).bitwise_and_(_WORD)
        even = high.flip(0).bitwise_xor_(odd).bitwise_xor_((key + i * steps) & _WORD)
        odd = low.flip(0)
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[S, vocab_size] float32 standard Gumbel noise, a function of (seed, position, token id) alone.

    The seed is Philox's key, (token id // 4, position, 0, 0) its counter and token id % 4 the word that is taken.
    """
    num_rows, num_counters = len(seeds), -(-vocab_size // 4)
    counter = torch.zeros((4, num_rows, num_counters), dtype=torch.long, device=seeds.device)
    counter[0] = torch.arange(num_counters, device=seeds.device)
    counter[1] = positions.unsqueeze(1)
    key = (seeds.long() & _WORD).t().unsqueeze(-1)  # [2, S, 1]
    bits = philox(counter, key).permute(1, 2, 0).flatten(1)[:, :vocab_size]
    # in (0, 1]; small values, which make large noise, keep all their digits
    uniform = (bits.float() + 0.5) * 2.0**-32
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Sampler(nn.Module):
    """argmax(logits / temperature + Gumbel noise) is a draw from softmax(logits / temperature).

    So the draw needs no sum over the vocabulary, no generator and no state, and it is the same wherever the row is
    computed. Temperature 0 is greedy.
    """

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """logits [S, vocabulary], temperatures [S], seeds [S, 2] and positions [S] of the token -> ids [S] int32."""
        if (ops := triton_ops(logits)) is not None:
            return ops.sample(logits, temperatures, seeds, positions, ROUNDS)
        scores = logits.float()
        rows = temperatures.nonzero().squeeze(-1)
        if len(rows) == len(scores):
            scores = scores / temperatures.unsqueeze(1) + gumbel_noise(seeds, positions, scores.shape[1])
        elif len(rows):
            noise = gumbel_noise(seeds[rows], positions[rows], scores.shape[1])
            scores = scores.index_copy(0, rows, scores[rows] / temperatures[rows].unsqueeze(1) + noise)
        return scores.argmax(-1).int()

"""The next token of each row: greedy, or drawn by Gumbel-max with stateless noise."""
import torch
from torch import nn

from nanovllm.kernels import triton_ops

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor], rounds: int = 10) -> list:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four words from each counter.

    Words are int64 tensors of values below 2^32, of shapes that broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # the product's upper word may come out negative: int64 is all that PyTorch has everywhere
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((odd >> 32) & _WORD) ^ c1 ^ k0, ((even >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = odd & _WORD, even & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return [c0, c1, c2, c3]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[S, vocab_size] float32 standard Gumbel noise, a function of (seed, position, token id) alone.

    The seed is Philox's key, (token id // 4, position, 0, 0) its counter and token id % 4 the word that is taken.
    """
    low, high = (seeds.long() & _WORD).unsqueeze(-1).unbind(1)  # [S, 1] each
    counter = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros((), dtype=torch.long, device=seeds.device)
    words = philox((counter, positions.long().unsqueeze(1) & _WORD, zero, zero), (low, high))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # v is in (0, 1]; small v, which makes large noise, keeps all its digits
    v = (bits.float() + 0.5) * 2.0**-32
    return v.neg_().log1p_().neg_().log_().neg_()


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
            return ops.sample(logits, temperatures, seeds, positions)
        token_ids = logits.argmax(-1)
        if len(rows := temperatures.nonzero().squeeze(-1)):
            noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[-1])
            token_ids[rows] = (logits[rows].float() / temperatures[rows, None] + noise).argmax(-1)
        return token_ids.int()

"""Token embedding and output head, divided over the ranks along the vocabulary."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import linear
from nanovllm.utils.loader import Shard, parameter
from nanovllm.utils.tensor_parallel import PartialSum, TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Each rank holds an equal range of the vocabulary and embeds other ids as zeros; the result is the ranks' sum."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.tp = tp
        local_size = tp.shard_size("vocabulary", vocab_size)
        self.first_id = tp.rank * local_size
        shard = Shard((vocab_size, hidden_size), tp.local_slice(vocab_size))
        self.weight = parameter((local_size, hidden_size), shard.copy, dtype)

    def forward(self, token_ids: torch.Tensor) -> PartialSum:
        """token_ids [T] -> [T, hidden_size]."""
        if self.tp.size == 1:
            return PartialSum(F.embedding(token_ids, self.weight))
        from nanovllm.layers.embed_shard import embed_shard  # one rank alone has all ids

        compute = partial(embed_shard, token_ids, self.weight, self.first_id)
        return self.tp.sum(compute, len(token_ids), self.weight.shape[1], self.weight.dtype)


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states [S, hidden_size] to logits [S, vocabulary]."""

    def forward(self, x: torch.Tensor, sampling_params: torch.Tensor | None = None) -> torch.Tensor:
        """With `sampling_params`, `SamplingRows.params` of layers/sampler.py, rows that are not filtered may lack the
        logits of the other ranks' ranges: those rows are sampled from this rank's own range.
        """
        compute = partial(linear, x, self.weight, None, 1)
        return self.tp.gather(compute, len(x), len(self.weight), x.dtype, sampling_params)

    def local_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The columns that this rank has computed, those of its range of the vocabulary."""
        return logits[:, self.first_id : self.first_id + len(self.weight)]

"""Token embedding and output head. Ranks split the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.layers.linear import linear
from nanovllm.utils.construction import get_construction
from nanovllm.utils.loader import Shard, parameter


@operation
def embed_shard(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return embeddings [T, N] of token ids. `weight` [n, N] is a shard, whose row 0 belongs to token `first_id`.

    Ids outside the shard get zeros. If `out` [1, T, N] is given, device kernels write the result to it. The PyTorch
    definition ignores `out`.
    """
    local_ids = token_ids - first_id
    is_local = (local_ids >= 0) & (local_ids < len(weight))
    x = F.embedding(local_ids.where(is_local, 0), weight)
    return x.masked_fill(~is_local.unsqueeze(-1), 0)


class VocabParallelEmbedding(nn.Module):
    """Embeds token ids. Each rank stores an equal share of the vocabulary, and the ranks' results are summed."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.tp, self.num_embeddings = get_construction().tp, num_embeddings
        local_size = self.tp.shard_size("vocabulary", num_embeddings)
        self.first_id = self.tp.rank * local_size
        self.weight = parameter((local_size, embedding_dim), self.weight_loader)

    def weight_loader(self, param: torch.Tensor, loaded_weight) -> torch.Tensor:
        whole = self.num_embeddings, param.shape[1]
        return Shard(whole, self.tp.local_slice(self.num_embeddings)).copy(param, loaded_weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids [T] to embeddings [T, embedding_dim]."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        return self.tp.all_reduce(embed_shard(token_ids, self.weight, self.first_id))


class ScaledEmbedding(VocabParallelEmbedding):
    """Multiplies the embeddings of an existing layer, whose weight it shares, by a factor."""

    def __init__(self, embedding: VocabParallelEmbedding, factor: float):
        nn.Module.__init__(self)  # the base class would allocate another weight
        self.tp, self.num_embeddings, self.first_id = embedding.tp, embedding.num_embeddings, embedding.first_id
        self.weight, self.factor = embedding.weight, factor

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * self.factor


class ParallelLMHead(VocabParallelEmbedding):
    """Maps hidden states [S, embedding_dim] to logits [S, vocabulary]."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.tp.all_gather(linear(hidden_states, self.weight))

    def local_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's share of the vocabulary."""
        return logits[:, self.first_id : self.first_id + len(self.weight)]

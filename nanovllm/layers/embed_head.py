"""Token embedding and output head, cut over the ranks along the vocabulary."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.peer_memory import PeerSum
from nanovllm.distributed.tensor_parallel import TensorParallel
from nanovllm.kernels import triton_ops
from nanovllm.layers.linear import linear
from nanovllm.utils.loader import copy_shard, parameter


class VocabParallelEmbedding(nn.Module):
    """Each rank holds an equal range of the vocabulary and knows nothing of other ids; the sum of all is the answer."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.tp = tp
        local_size = tp.shard_size("vocabulary", vocab_size)
        self.first_id = tp.rank * local_size
        load = partial(copy_shard, shape=(vocab_size, hidden_size), dim=0, tp=tp)
        self.weight = parameter((local_size, hidden_size), load, dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor | PeerSum:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        if self.tp.peers is not None:
            x = self.tp.peers.place(1, len(token_ids), self.weight.shape[1], self.weight.dtype)
            triton_ops(x.mine).embed_range(token_ids, self.weight, self.first_id, x.mine[0])
            return x
        local_ids = token_ids - self.first_id
        ours = (local_ids >= 0) & (local_ids < len(self.weight))
        x = F.embedding(local_ids.where(ours, 0), self.weight)
        return self.tp.all_reduce(x.masked_fill(~ours.unsqueeze(-1), 0))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states [S, hidden_size] to logits [S, vocabulary]."""

    def forward(self, x: torch.Tensor, asked: torch.Tensor | None = None) -> torch.Tensor:
        """With `asked`, the params of layers.logits' Rows, the other ranks' part may miss in rows that need only our own."""
        if self.tp.size == 1:
            return linear(x, self.weight)
        if self.tp.peers is not None:
            y = self.tp.peers.place(1, len(x), len(self.weight), x.dtype)
            linear(x, self.weight, out=y.mine)
            return triton_ops(x).gather_columns(y.mine[0], y.meeting, asked)
        return self.tp.all_gather(linear(x, self.weight)).transpose(0, 1).flatten(1)

    def own_part(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, self.first_id : self.first_id + len(self.weight)]

"""The embedding by one of several ranks, which holds a range of the vocabulary. One rank alone does without."""

import torch
import torch.nn.functional as F

from nanovllm.kernels import operation


@operation
def embed_shard(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [T, N] of weight [n, N], which are those of `first_id` and the next ids; zeros for other ids.

    `out` [1, T, N] takes them.
    """
    local_ids = token_ids - first_id
    is_local = (local_ids >= 0) & (local_ids < len(weight))
    x = F.embedding(local_ids.where(is_local, 0), weight)
    return x.masked_fill(~is_local.unsqueeze(-1), 0)

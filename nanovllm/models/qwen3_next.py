"""Qwen3-Next: a hybrid model with mixtures of experts and a shared expert.

In checkpoints, the rows of projections are grouped by key head.
"""

from itertools import accumulate, chain, pairwise
from typing import ClassVar

from nanovllm.delta_net.gated_delta_net import DeltaHeads
from nanovllm.models.shared.hybrid import HybridForCausalLM
from nanovllm.utils.tensor_parallel import TensorParallel


class Qwen3NextForCausalLM(HybridForCausalLM):
    defaults: ClassVar = HybridForCausalLM.defaults | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }

    @staticmethod
    def delta_net_weights(heads: DeltaHeads, tp: TensorParallel) -> tuple[list, list]:
        group = heads.num_values // heads.num_keys
        values = group * heads.value_dim
        qkvz, ba = (heads.key_dim, heads.key_dim, values, values), (group, group)
        return [_interleaved(qkvz, heads.num_keys, tp)], [_interleaved(ba, heads.num_keys, tp)]


def _interleaved(sizes: tuple[int, ...], num_heads: int, tp: TensorParallel) -> tuple[int, tuple[range, ...]]:
    """Return the number of rows of a weight, and the ranges of rows that belong to this rank.

    The weight has a range of rows for each key head and each kind of projection, such as q. `sizes` contains the number
    of rows per head for each kind of projection. The returned ranges are ordered by kind, then by head.
    """
    starts = [head * sum(sizes) for head in range(num_heads)[tp.local_slice(num_heads)]]
    bounds = pairwise(accumulate(sizes, initial=0))
    return num_heads * sum(sizes), tuple(chain(*([range(s + a, s + b) for s in starts] for a, b in bounds)))

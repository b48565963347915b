"""Linear layers: replicated, or split over ranks by outputs (column-parallel) or inputs (row-parallel)."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.utils.construction import get_construction
from nanovllm.utils.loader import Shard, parameter
from nanovllm.utils.tensor_parallel import TensorParallel


@operation
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, which is [T, outputs]. `x` is [T, inputs], and `weight` is [outputs, inputs]."""
    return F.linear(x, weight, bias)


class LinearBase(nn.Module):
    """Computes x W^T + b. The weight [outputs, inputs] and bias [outputs] are this rank's parts."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__()
        self.tp = get_construction().tp
        self.weight = parameter((output_size, input_size), self.weight_loader, is_linear=True)
        self.bias = parameter((output_size,), self.weight_loader, is_linear=True) if bias else None

    def shard_ids(self) -> list[tuple]:
        """Return the shard ids of the merged checkpoint weights. A single weight has an empty id."""
        return [()]

    def shard(self, *shard_id: int | str) -> Shard:
        raise NotImplementedError

    def weight_loader(self, param: torch.Tensor, loaded_weight, *shard_id: int | str) -> torch.Tensor:
        return self.shard(*shard_id).copy(param, loaded_weight)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x W^T + bias. Quantized layers override this method."""
        return linear(x, self.weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.bias)


class ReplicatedLinear(LinearBase):
    """A linear layer whose complete weight is on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self.shape = output_size, input_size
        super().__init__(input_size, output_size, bias)

    def shard(self) -> Shard:
        return Shard(self.shape)


class MergedColumnParallelLinear(LinearBase):
    """Merges layers with the same input. Each rank computes an equal share of each layer's outputs."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = False,
        divisions: list[TensorParallel] | None = None,
    ):
        """divisions: how each layer is split over ranks, by default over all."""
        self.input_size, self.output_sizes = input_size, output_sizes
        self.divisions = divisions or [get_construction().tp] * len(output_sizes)
        pairs = zip(self.divisions, output_sizes)
        self.local_sizes = [tp.shard_size("outputs of a layer", size) for tp, size in pairs]
        super().__init__(input_size, sum(self.local_sizes), bias)

    def shard_ids(self) -> list[tuple]:
        return [(i,) for i in range(len(self.output_sizes))]

    def shard(self, shard_id: int | str | None = None) -> Shard:
        ids = [weight_id for (weight_id,) in self.shard_ids()]
        if shard_id not in ids and (shard_id is not None or len(ids) > 1):
            raise ValueError(f"shard_id={shard_id!r}: must be one of {', '.join(map(repr, ids))}")
        i = 0 if shard_id is None else ids.index(shard_id)
        size, tp = self.output_sizes[i], self.divisions[i]
        return Shard((size, self.input_size), tp.local_slice(size), first_row=sum(self.local_sizes[:i]))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer. Each rank computes an equal share of the output features."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__(input_size, [output_size], bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Merges the query, key and value projections, and splits them by heads. Ranks may share a key-value head."""

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int | None = None, bias: bool = False
    ):
        """The arguments count the heads of all ranks, and the attributes those of this rank."""
        num_kv_heads, tp = num_kv_heads or num_heads, get_construction().tp
        kv_tp = tp.for_heads(num_kv_heads)
        local = tp.shard_size("query heads", num_heads), kv_tp.shard_size("key-value heads", num_kv_heads)
        sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
        super().__init__(hidden_size, sizes, bias, [tp, kv_tp, kv_tp])
        self.num_heads, self.num_kv_heads = local

    def shard_ids(self) -> list[tuple]:
        return [("q",), ("k",), ("v",)]


class RowParallelLinear(LinearBase):
    """Each rank reads a slice of the input features, and the ranks' results are summed."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self.input_size, self.output_size = input_size, output_size
        super().__init__(get_construction().tp.shard_size("inputs of a layer", input_size), output_size, bias)

    def shard(self) -> Shard:
        return Shard((self.output_size, self.input_size), columns=self.tp.local_slice(self.input_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must contain the bias once
        return self.tp.all_reduce(self.multiply(x, bias))

"""Column-parallel layers whose rows are not contiguous in a checkpoint's weight."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from nanovllm.layers.linear import LinearBase, QKVParallelLinear
from nanovllm.utils.loader import Shard, check_shape


class RowRanges(NamedTuple):
    """A Shard that joins several row ranges of a checkpoint's weight."""

    shape: tuple[int, ...]  # of the whole weight of the checkpoint
    ranges: tuple[range, ...]
    first_row: int = 0  # where these ranges begin in the rank's weight

    @property
    def parts(self) -> list[Shard]:
        parts, row = [], self.first_row
        for rows in self.ranges:
            parts.append(Shard(self.shape, slice(rows.start, rows.stop), first_row=row))
            row += len(rows)
        return parts

    def copy(self, target: torch.Tensor, weight) -> torch.Tensor:
        weight = check_shape(weight, self.shape[: target.dim()])
        for part in self.parts:
            part.copy(target, weight)
        return target.narrow(0, self.first_row, sum(map(len, self.ranges)))


class ScatteredColumnParallelLinear(LinearBase):
    """A column-parallel layer that joins several ranges of rows from each weight of the checkpoint.

    `weights` contains a pair for each weight: (number of rows, row ranges of this rank).
    """

    def __init__(self, input_size: int, weights: Iterable[tuple[int, tuple[range, ...]]]):
        self.weights, self.input_size = [*weights], input_size
        self.local_sizes = [sum(map(len, ranges)) for _, ranges in self.weights]
        super().__init__(input_size, sum(self.local_sizes))

    def shard_ids(self) -> list[tuple[int, ...]]:
        return [(i,) for i in range(len(self.weights))] if len(self.weights) > 1 else [()]

    def shard(self, shard_id: int = 0) -> RowRanges:
        num_rows, ranges = self.weights[shard_id]
        return RowRanges((num_rows, self.input_size), ranges, sum(self.local_sizes[:shard_id]))


class GatedQKVParallelLinear(QKVParallelLinear):
    """A projection to gates, queries, keys and values. Each of `num_heads` heads has a query and a gate.

    A checkpoint stores the gate of each head after the head's query. The result contains the gates of all heads, then
    the queries, keys and values.
    """

    def __init__(self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, bias: bool = False):
        super().__init__(hidden_size, head_size, 2 * num_heads, num_kv_heads, bias)
        self.head_dim = head_size

    def shard(self, shard_id: int | str = "q") -> Shard:
        shard = super().shard(shard_id)
        if shard_id != "q":
            return shard
        starts = range(shard.shape[0])[shard.rows][:: self.head_dim]  # queries and gates alternate
        ranges = [range(start, start + self.head_dim) for start in (*starts[1::2], *starts[::2])]
        return RowRanges(shard.shape, tuple(ranges))  # type: ignore[return-value]

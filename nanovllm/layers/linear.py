"""Linear layers cut over the ranks: by column (outputs), several merged into one product, and by row (inputs)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.peer_memory import PeerSum
from nanovllm.distributed.tensor_parallel import TensorParallel
from nanovllm.kernels import triton_ops
from nanovllm.utils.loader import copy_shard, parameter


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    parts: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs] times weight [outputs, inputs] transposed, plus the bias -> [T, outputs].

    With more than one of the `parts` that `parts_of` allows it is [parts, T, outputs], to be summed. `out` [parts, T,
    outputs] takes the result.
    """
    if bias is None and (ops := triton_ops(x)) is not None:
        if len(x) == 1:
            return ops.gemv(x, weight, out=None if out is None else out[0])[0]
        if ops.choose_split_k(x, weight, parts):
            y = ops.split_k_gemm(x, weight, parts, out)
            return y if parts > 1 else y[0]
    if out is None:
        # each number of rows is another oneDNN primitive, whose code takes about half a MiB: few sizes bound their memory
        num_padding = _padded_rows(len(x)) - len(x) if x.is_cpu and x.dtype is not torch.float32 else 0
        return (
            F.linear(F.pad(x, (0, 0, 0, num_padding)), weight, bias)[: len(x)]
            if num_padding
            else F.linear(x, weight, bias)
        )
    return torch.mm(x, weight.t(), out=out[0]) if bias is None else torch.addmm(bias, x, weight.t(), out=out[0])


def _padded_rows(num_rows: int) -> int:
    """The least of the sizes that is enough: up to 64 all, then eight for each power of two, at most 256 apart."""
    step = 1 if num_rows <= 64 else min(256, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def parts_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> int:
    """In how many parts, of `most`, their product is computed best."""
    ops = triton_ops(x) if bias is None and len(x) > 1 else None
    return max(1, ops.choose_split_k(x, weight, most)) if ops is not None else 1


class MergedColumnParallelLinear(nn.Module):
    """y = x W^T + b for several layers of the same input in one product; each rank computes its part of each.

    `outputs` lists the size of each layer's whole output and the ranks that it is cut over.
    """

    def __init__(
        self,
        input_size: int,
        outputs: list[tuple[int, TensorParallel]],
        bias: bool,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.input_size = input_size
        self.outputs = outputs
        self.local_sizes = [tp.shard_size("outputs of a layer", size) for size, tp in outputs]
        self.weight = parameter((sum(self.local_sizes), input_size), self._load, dtype)
        self.bias = parameter((sum(self.local_sizes),), self._load, dtype) if bias else None

    def _load(self, target: torch.Tensor, weight, place: int) -> torch.Tensor:
        size, tp = self.outputs[place]
        part = target.narrow(0, sum(self.local_sizes[:place]), self.local_sizes[place])
        return copy_shard(part, weight, (size, *target.shape[1:]), 0, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value in one, cut by heads; key-value heads are replicated where there are fewer than ranks."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype = torch.float32,
    ):
        kv_tp = tp.for_heads(num_kv_heads)
        heads = tp.shard_size("query heads", num_heads)
        kv_heads = kv_tp.shard_size("key-value heads", num_kv_heads)
        kv_size = num_kv_heads * head_dim
        super().__init__(hidden_size, [(num_heads * head_dim, tp), (kv_size, kv_tp), (kv_size, kv_tp)], bias, dtype)
        self.num_heads, self.num_kv_heads = heads, kv_heads  # of this rank


class RowParallelLinear(nn.Module):
    """y = x W^T + b with x and W cut along the inputs: each rank has its part of x, and the sum of all is y.

    A product of few rows may be cut so on a single rank too: y is then [parts, T, outputs], and the norm that reads it adds
    up the parts. Where the ranks read each other's memory y is a PeerSum, which that norm adds up.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.tp = tp
        load = partial(copy_shard, shape=(output_size, input_size), dim=1, tp=tp)
        self.weight = parameter((output_size, tp.shard_size("inputs of a layer", input_size)), load, dtype)
        self.bias = parameter((output_size,), partial(copy_shard, shape=(output_size,)), dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor | PeerSum:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must have it once
        if self.tp.peers is not None:
            parts = parts_of(x, self.weight, self.bias, most=2 if len(x) <= 32 else 1)  # the others have them to read
            y = self.tp.peers.place(parts, len(x), len(self.weight), x.dtype)
            linear(x, self.weight, bias, parts, y.mine)
            return y
        parts = parts_of(x, self.weight, bias, most=4 if self.tp.size == 1 else 1)
        return self.tp.all_reduce(linear(x, self.weight, bias, parts))

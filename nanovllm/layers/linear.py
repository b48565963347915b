"""Linear layers divided over the ranks: column-parallel (by outputs), also several in one product, and row-parallel."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.layers.partial_sum import PartialSum
from nanovllm.utils.loader import copy_shard, parameter
from nanovllm.utils.tensor_parallel import TensorParallel


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs] times weight [outputs, inputs] transposed, plus the bias -> [T, outputs].

    With split_k > 1, as `choose_split_k` returns it, the result is [split_k, T, outputs], to be summed. `out` [split_k,
    T, outputs] takes the result.
    """
    if (ops := triton_ops(x)) is not None:
        y = _small_batch_linear(ops, x, weight, bias, split_k, out)
        if y is not None:
            return y
    if out is not None:
        return torch.mm(x, weight.t(), out=out[0]) if bias is None else torch.addmm(bias, x, weight.t(), out=out[0])
    # oneDNN compiles about half a MiB of code for each number of rows: padding to few sizes bounds that memory
    num_padding = _padded_rows(len(x)) - len(x) if x.is_cpu and x.dtype is not torch.float32 else 0
    if num_padding:
        return F.linear(F.pad(x, (0, 0, 0, num_padding)), weight, bias)[: len(x)]
    return F.linear(x, weight, bias)


def _padded_rows(num_rows: int) -> int:
    """The next size: every number up to 64, then eight sizes for each power of two, at most 256 apart."""
    step = 1 if num_rows <= 64 else min(256, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def _small_batch_linear(
    ops: ModuleType,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    split_k: int,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """`linear` by our own kernels; None where the library is faster, or where only the library adds a bias."""
    if len(x) == 1:
        return ops.gemv(x, weight, bias=bias, out=None if out is None else out[0])[0]
    if bias is not None:
        return None
    if split_k > 1:
        return ops.split_k_gemm(x, weight, split_k, out)
    if ops.choose_split_k(x, weight, 1):
        return ops.split_k_gemm(x, weight, 1, out)[0]
    return None


def choose_split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, max_split_k: int) -> int:
    """Into how many partial sums, of at most `max_split_k`, `linear` had best split the product along its inputs."""
    ops = triton_ops(x) if bias is None and len(x) > 1 else None
    return max(1, ops.choose_split_k(x, weight, max_split_k)) if ops is not None else 1


class LinearBase(nn.Module):
    """This rank's weight [outputs, inputs] and bias [outputs]."""

    def __init__(self, num_outputs: int, num_inputs: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter((num_outputs, num_inputs), self._load, dtype)
        self.bias = parameter((num_outputs,), self._load, dtype) if bias else None

    def _load(self, target: torch.Tensor, weight, *shard_id: int) -> torch.Tensor:
        """Copy this rank's shard of a checkpoint's weight or bias to `target`; returns what was filled."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        """y = x W^T + b."""
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(LinearBase):
    """Each rank computes an equal range of the outputs."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ):
        super().__init__(tp.shard_size("outputs of a layer", output_size), input_size, bias, dtype)
        self.output_size = output_size
        self.tp = tp

    def _load(self, target: torch.Tensor, weight) -> torch.Tensor:
        return copy_shard(target, weight, (self.output_size, *target.shape[1:]), 0, self.tp)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers with the same input, in one product; each rank computes its range of each.

    `outputs` lists the size of each layer's whole output, and the ranks that it is divided over.
    """

    def __init__(
        self,
        input_size: int,
        outputs: list[tuple[int, TensorParallel]],
        bias: bool,
        dtype: torch.dtype = torch.float32,
    ):
        local_sizes = [tp.shard_size("outputs of a layer", size) for size, tp in outputs]
        super().__init__(sum(local_sizes), input_size, bias, dtype)
        self.outputs = outputs
        self.local_sizes = local_sizes

    def _load(self, target: torch.Tensor, weight, shard_id: int) -> torch.Tensor:
        size, tp = self.outputs[shard_id]
        shard = target.narrow(0, sum(self.local_sizes[:shard_id]), self.local_sizes[shard_id])
        return copy_shard(shard, weight, (size, *target.shape[1:]), 0, tp)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value in one product, divided by heads; ranks share key-value heads if there are too few."""

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
        local_heads = tp.shard_size("query heads", num_heads)
        local_kv_heads = kv_tp.shard_size("key-value heads", num_kv_heads)
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        super().__init__(hidden_size, [(q_size, tp), (kv_size, kv_tp), (kv_size, kv_tp)], bias, dtype)
        self.num_heads = local_heads
        self.num_kv_heads = local_kv_heads


class RowParallelLinear(LinearBase):
    """x and W are divided along the inputs: each rank has its range of x, and y is the sum over the ranks.

    A single rank with a small batch may split W so as well: if there are too few output tiles to fill the GPU, the
    product is computed as several partial sums (split-K). The next norm adds up all that is still in parts.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ):
        super().__init__(output_size, tp.shard_size("inputs of a layer", input_size), bias, dtype)
        self.input_size = input_size
        self.tp = tp

    def _load(self, target: torch.Tensor, weight) -> torch.Tensor:
        if target.dim() == 1:  # the bias, which is not divided
            return copy_shard(target, weight, tuple(target.shape))
        return copy_shard(target, weight, (len(target), self.input_size), 1, self.tp)

    def forward(self, x: torch.Tensor) -> PartialSum:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must contain it once
        if self.tp.has_peers:
            return self._forward_to_peers(x, bias)
        split_k = choose_split_k(x, self.weight, bias, 4 if self.tp.size == 1 else 1)
        return PartialSum(self.tp.all_reduce(linear(x, self.weight, bias, split_k)), split_k)

    def _forward_to_peers(self, x: torch.Tensor, bias: torch.Tensor | None) -> PartialSum:
        """Write this rank's parts where the other ranks read them."""
        max_split_k = 2 if len(x) <= 32 else 1  # every rank reads the parts of all
        split_k = choose_split_k(x, self.weight, self.bias, max_split_k)
        y = self.tp.peer_sum(split_k, len(x), len(self.weight), x.dtype)
        linear(x, self.weight, bias, split_k, y.parts)
        return y

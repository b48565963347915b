"""Linear layers divided over the ranks: column-parallel (by outputs), also several in one product, and row-parallel."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import NormInput
from nanovllm.utils.loader import Shard, parameter
from nanovllm.utils.tensor_parallel import PartialSum, TensorParallel


@operation
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs] times weight [outputs, inputs] transposed, plus the bias -> [T, outputs].

    With split_k > 1, as `best_split_k` returns it, the result is [split_k, T, outputs], to be summed; for this
    definition it returns 1. `out` [split_k, T, outputs] takes the result.
    """
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


@operation
def norm_linear(
    x: NormInput, weight: torch.Tensor, bias: torch.Tensor | None = None, act: SiluAndMul | None = None
) -> torch.Tensor:
    """`linear` of a norm, and the activation, whose result may have another format."""
    y = linear(x.tensor(), weight, bias)
    return y if act is None else act(y)


@operation
def best_split_k(x: torch.Tensor, weight: torch.Tensor, max_split_k: int) -> int:
    """The best number of partial sums, at most `max_split_k`, for `linear` to split a product along its inputs."""
    return 1


class WeightFormat:
    """How a layer stores and multiplies its weight: here in the dtype of the activations; quantization/ has others."""

    def linear(self, layer: "LinearBase", x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        """The function `linear` with this layer's weight."""
        return linear(x, layer.weight, bias, split_k, out)

    def norm_linear(self, layer: "LinearBase", x: NormInput, act: SiluAndMul | None) -> Any:
        """The function `norm_linear` with this layer's weight and bias."""
        return norm_linear(x, layer.weight, layer.bias, act)

    def best_split_k(self, layer: "LinearBase", x: Any, max_split_k: int) -> int:
        """The function `best_split_k` with this layer's weight."""
        return best_split_k(x, layer.weight, max_split_k)

    def factors(self, layer: "LinearBase", x: NormInput) -> tuple[Any, torch.Tensor, torch.Tensor | None] | None:
        """What kernels multiply: rows, the weight, and its scales if both are in FP8; None if only `linear` can."""
        return (x.tensor(), layer.weight, None) if type(self) is WeightFormat else None


class LinearBase(nn.Module):
    """This rank's weight [outputs, inputs] in some format, and bias [outputs].

    Without a dtype they take no memory before a weight format allocates them.
    """

    def __init__(self, num_outputs: int, num_inputs: int, bias: bool, dtype: torch.dtype | None):
        super().__init__()
        self.weight = parameter((num_outputs, num_inputs), self._load, dtype)
        self.bias = parameter((num_outputs,), self._load, dtype) if bias else None
        self.format = WeightFormat()

    def shard_ids(self) -> list[tuple[int, ...]]:
        """The ids of the checkpoint's weights that share this layer; a single empty id if one weight has it alone."""
        return [()]

    def shard(self, *shard_id: int) -> Shard:
        """The shard of the checkpoint's weight with this id."""
        raise NotImplementedError

    def _load(self, target: torch.Tensor, weight, *shard_id: int) -> torch.Tensor:
        return self.shard(*shard_id).copy(target, weight)

    def forward(self, x: torch.Tensor | NormInput, act: nn.Module | None = None) -> Any:
        """y = x W^T + b; if x is a norm, act(x W^T + b). Formats and kernels know no activation but SiluAndMul."""
        if not isinstance(x, NormInput):
            return self.format.linear(self, x, self.bias)
        if act is None or isinstance(act, SiluAndMul):
            return self.format.norm_linear(self, x, act)
        return act(self.format.norm_linear(self, x, None))


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers with the same input, in one product; each rank computes its range of each.

    `outputs` lists the size of each layer's whole output, and the ranks that it is divided over.
    """

    def __init__(
        self, input_size: int, outputs: list[tuple[int, TensorParallel]], bias: bool, dtype: torch.dtype = torch.float32
    ):
        local_sizes = [tp.shard_size("outputs of a layer", size) for size, tp in outputs]
        super().__init__(sum(local_sizes), input_size, bias, dtype)
        self.input_size = input_size
        self.outputs = outputs
        self.local_sizes = local_sizes

    def shard_ids(self) -> list[tuple[int, ...]]:
        return [(i,) for i in range(len(self.outputs))]

    def shard(self, shard_id: int = 0) -> Shard:
        size, tp = self.outputs[shard_id]
        return Shard((size, self.input_size), tp.local_slice(size), first_row=sum(self.local_sizes[:shard_id]))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Each rank computes an equal range of the outputs."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ):
        super().__init__(input_size, [(output_size, tp)], bias, dtype)


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
        kv_tp = tp
        if tp.size > 1:
            from nanovllm.distributed.division import for_heads  # ranks may share heads

            kv_tp = for_heads(tp, num_kv_heads)
        local_heads = tp.shard_size("query heads", num_heads)
        local_kv_heads = kv_tp.shard_size("key-value heads", num_kv_heads)
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        super().__init__(hidden_size, [(q_size, tp), (kv_size, kv_tp), (kv_size, kv_tp)], bias, dtype)
        self.num_heads = local_heads
        self.num_kv_heads = local_kv_heads


class RowParallelLinear(LinearBase):
    """x and W are divided along the inputs: each rank has its range of x, and y is the sum over the ranks.

    With a small batch, a rank may also split its own product into partial sums (split-K), where that is faster. The
    next norm adds up all that is still in parts.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ):
        super().__init__(output_size, tp.shard_size("inputs of a layer", input_size), bias, dtype)
        self.input_size = input_size
        self.output_size = output_size
        self.tp = tp

    def shard(self) -> Shard:
        return Shard((self.output_size, self.input_size), columns=self.tp.local_slice(self.input_size))

    def forward(self, x: torch.Tensor) -> PartialSum:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must contain it once
        num_rows, split_k = len(x), 1
        if self.bias is None:
            split_k = self.format.best_split_k(self, x, self.tp.max_split_k(num_rows))
        compute = partial(self.format.linear, self, x, bias, split_k)
        return self.tp.sum(compute, num_rows, self.output_size, x.dtype, split_k)

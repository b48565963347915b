"""Linear layers cut over the ranks: by column (outputs), several merged into one product, and by row (inputs)."""
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.utils.distributed import TensorParallel
from nanovllm.utils.loader import copy_weight, shard
from nanovllm.utils.peer_memory import PeerSum


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, parts: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, inputs] times weight [outputs, inputs] transposed, plus the bias; `out` takes it.

    The result may be [parts, T, outputs], to be summed, for a caller that allows it by more than one part.
    """
    if bias is None and (ops := triton_ops(x)) is not None:
        if len(x) == 1:
            return ops.one_row_linear(x, weight, out=out)[0]
        if ops.suits_few_row_linear(x, weight):
            y = ops.few_row_linear(x, weight, parts, out)
            return y if parts > 1 else y[0]
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class MergedColumnParallelLinear(nn.Module):
    """y = x W^T + b for several layers of the same input in one product; each rank computes its part of each.

    `outputs` lists the size of each layer's whole output and the ranks that it is cut over.
    """

    def __init__(self, input_size: int, outputs: list[tuple[int, TensorParallel]], bias: bool):
        super().__init__()
        self.input_size = input_size
        self.outputs = outputs
        self.local_sizes = [tp.share("outputs of a layer", size) for size, tp in outputs]
        self.weight = nn.Parameter(torch.empty(sum(self.local_sizes), input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.local_sizes)), requires_grad=False) if bias else None
        self.weight.weight_loader = lambda weight, place=0: self._load(self.weight, weight, place)
        if bias:
            self.bias.weight_loader = lambda weight, place=0: self._load(self.bias, weight, place)

    def _load(self, parameter: torch.Tensor, weight, place: int) -> None:
        size, tp = self.outputs[place]
        part = parameter.narrow(0, sum(self.local_sizes[:place]), self.local_sizes[place])
        copy_weight(part, weight, (size, *parameter.shape[1:]), lambda whole: shard(whole, 0, tp))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One layer, each rank computing its part of the output."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel):
        super().__init__(input_size, [(output_size, tp)], bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value in one, cut by heads; key-value heads are replicated where there are fewer than ranks."""

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, tp: TensorParallel
    ):
        kv_tp = tp.for_heads(num_kv_heads)
        heads = tp.share("query heads", num_heads)
        kv_heads = kv_tp.share("key-value heads", num_kv_heads)
        kv_size = num_kv_heads * head_dim
        super().__init__(hidden_size, [(num_heads * head_dim, tp), (kv_size, kv_tp), (kv_size, kv_tp)], bias)
        self.num_heads, self.num_kv_heads = heads, kv_heads  # of this rank


class RowParallelLinear(nn.Module):
    """y = x W^T + b with x and W cut along the inputs: each rank has its part of x, and the sum of all is y.

    On a single rank a product of few rows may be cut so too, if `few_row_linear` suits it: y is then [4, T, outputs], and
    the norm that reads it adds up the parts. Where the ranks read each other's memory y is a PeerSum, which that norm adds up.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.shape = (output_size, input_size)
        local_size = tp.share("inputs of a layer", input_size)
        self.weight = nn.Parameter(torch.empty(output_size, local_size), requires_grad=False)
        self.weight.weight_loader = lambda weight: copy_weight(
            self.weight, weight, self.shape, lambda whole: shard(whole, 1, tp)
        )
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        if bias:
            self.bias.weight_loader = lambda weight: copy_weight(self.bias, weight, self.shape[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor | PeerSum:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must have it once
        if self.tp.peers is not None:
            y = self.tp.peers.place(1, len(x), len(self.weight), x.dtype)
            linear(x, self.weight, bias, out=y.mine[0])
            return y
        parts = 4 if self.tp.size == 1 else 1
        return self.tp.all_reduce(linear(x, self.weight, bias, parts))

"""Implements linear layers and mixtures of experts with 4-bit weights. Matmuls use the activations' dtype (W4A16)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.fused.fused_linear import WeightFormat, split_linear
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.layers.linear import LinearBase
from nanovllm.moe.experts import DOWN, GATE, UP, Experts, ExpertsFormat
from nanovllm.quantization.packed import Packed, PackedScheme, PackedWeight, dequantize_packed
from nanovllm.utils.loader import Shard, check_shape


@operation
def packed_linear(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    act: nn.Module | None = None,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `split_linear` with a 4-bit weight. Then apply the activation."""
    y = split_linear(x, dequantize_packed(weight, x.dtype), bias, 1, out)
    return y if act is None else act(y)


@operation
def best_packed_split_k(x: torch.Tensor, weight: Packed, max_split_k: int) -> int:
    return 1


class PackedLinear(WeightFormat):
    """The weight format for 4-bit weights. The kernels of matmuls convert the weights while they read them."""

    def __init__(self, layer: LinearBase, scheme: PackedScheme):
        shards, shape = [layer.shard(*shard_id) for shard_id in layer.shard_ids()], tuple(layer.weight.shape)
        self.weight = PackedWeight(shape, scheme, shards, lambda *shard_id: (layer.shard(*shard_id), ()))
        del layer.weight
        for name, parameter in self.weight.parameters.items():
            setattr(layer, name, parameter)

    @property
    def packed(self) -> Packed:
        return self.weight.packed

    def move_to_end(self, stack: Packed) -> None:
        """Store this weight as the last weight of `stack`. The weight must not be loaded yet."""
        self.weight.move_to(stack.of(-1))

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        return packed_linear(x, self.packed, bias, None, split_k, out)

    def norm_linear(self, layer: LinearBase, x: NormInput, act: nn.Module | None) -> Any:
        return packed_linear(x.tensor(), self.packed, layer.bias, act)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        return best_packed_split_k(x, self.packed, max_split_k)


class PackedExperts(ExpertsFormat):
    is_packed = True

    def __init__(self, experts: Experts, scheme: PackedScheme):
        stacks = []
        for name, shard_ids in (("gate_up_proj", (GATE, UP)), ("down_proj", (DOWN,))):
            weight = PackedStack(tuple(getattr(experts, name).shape), scheme, experts, shard_ids)
            delattr(experts, name)
            self.suffixes = {tensor: "" if tensor == "weight" else f"_{tensor}" for tensor in weight.parameters}
            for tensor, parameter in weight.parameters.items():
                setattr(experts, name + self.suffixes[tensor], parameter)
            stacks.append(weight.packed)
        self.gate_up_proj, self.down_proj = stacks

    def weight(self, experts: Experts, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_packed(getattr(self, name).of(index), dtype)

    def stacks(self, experts: Experts) -> tuple[Packed, Packed]:
        return self.gate_up_proj, self.down_proj


class PackedStack(PackedWeight):
    """Holds the stacked weights of a rank's experts: `gate_up_proj` or `down_proj`."""

    advice = "use fewer ranks, or expert_parallel=True, which divides no expert"

    def __init__(self, shape: tuple[int, ...], scheme: PackedScheme, experts: Experts, shard_ids: tuple[int, ...]):
        self.first_expert, self.num_local, self.num_experts = (
            experts.first_expert,
            experts.num_local,
            experts.num_experts,
        )
        self.shards = {shard_id: experts.shard(shard_id) for shard_id in shard_ids}
        self.alternates = experts.alternates
        super().__init__(shape, scheme, [*self.shards.values()], self._select)

    def _select(self, expert: int, shard_id: int) -> tuple[Shard, tuple[int, ...]] | None:
        index = expert - self.first_expert
        return (self.shards[shard_id], (index,)) if 0 <= index < self.num_local else None

    def _quantize(self, target: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Quantize the weight of one expert. If `arguments` is empty, quantize the weights of all experts."""
        if arguments:
            return super()._quantize(target, weight, *arguments)
        for part, *arguments in self._parts(weight):
            super()._quantize(target, part, *arguments)
        return self.packed.scales[: self.num_local]  # a shared expert is loaded separately

    def _load(self, field: str, read: Callable, target: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Load a tensor of one expert. If `arguments` is empty, the tensor contains all experts."""
        if arguments:
            return super()._load(field, read, target, weight, *arguments)
        if callable(weight):
            for part, *arguments in self._parts(weight):
                super()._load(field, read, target, lambda shape, part=part: part, *arguments)
            return None
        if not self.alternates:
            raise ValueError("quantized experts in one tensor are not supported: each needs tensors of its own")
        if (count := weight.get_shape()[0]) != self.num_experts:
            raise ValueError(f"the checkpoint has {count} experts, the model needs {self.num_experts}")
        filled = []
        for expert in range(self.first_expert, self.first_expert + self.num_local):
            data = read(weight[expert])
            for i, shard_id in enumerate(self.shards):
                filled.append(super()._load(field, torch.clone, target, data[i :: len(self.shards)], expert, shard_id))
        return torch.cat([part for part in filled if part is not None]) if field == "scales" else None

    def _parts(self, weight) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (weight, expert, shard id) for each shard of this rank's experts. `weight` contains all experts."""
        sizes = [shard.shape[0] for shard in self.shards.values()]
        weight = check_shape(weight, (self.num_experts, sum(sizes), next(iter(self.shards.values())).shape[1]))
        for expert in range(self.first_expert, self.first_expert + self.num_local):
            for shard_id, part in zip(self.shards, weight[expert].split(sizes)):
                yield part, expert, shard_id

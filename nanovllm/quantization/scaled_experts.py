"""Defines formats for mixtures of experts with 8-bit weights."""

import torch

from nanovllm.moe.experts import DOWN, GATE, UP, Experts, ExpertsFormat
from nanovllm.quantization.scaled import Block, QuantScheme, ScaledWeight, dequantize, min_block_columns
from nanovllm.utils.loader import Shard, check_shape


class ScaledExperts(ExpertsFormat):
    """The weight format for experts with 8-bit weights and matmuls in the dtype of the activations (W8A16)."""

    is_scaled = True

    def __init__(self, experts: Experts, scheme: QuantScheme):
        suffix = None if scheme.scale_name is None else scheme.scale_name.removeprefix("weight")
        self.suffixes = {"weight": ""} if suffix is None else {"weight": "", scheme.scale_name: suffix}
        self.weights: dict[str, ScaledWeight] = {}
        for name, shard_ids in (("gate_up_proj", (GATE, UP)), ("down_proj", (DOWN,))):
            shape = tuple(getattr(experts, name).shape)
            block = scheme.local_block([experts.shard(shard_id) for shard_id in shard_ids], shape[2])
            weight = StackedWeight(shape, scheme, block, experts, shard_ids)
            self.weights[name] = weight
            setattr(experts, name, weight.values)
            if suffix is not None:
                setattr(experts, name + suffix, weight.scales)
            if block.columns < (least := min_block_columns(weight.values)):
                raise ValueError(
                    f"{name}: its scales are for {block.columns} inputs each on this rank: here it must be at least "
                    f"{least}; expert_parallel=True divides no expert"
                )

    def weight(self, experts: Experts, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weights[name]
        return dequantize(weight.values[index], weight.scales[index], dtype)

    def stacks(self, experts: Experts) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Return (values, scales) of `gate_up_proj`, and of `down_proj`."""
        return tuple((weight.values, weight.scales) for weight in self.weights.values())


class FP8Experts(ScaledExperts):
    """The weight format of experts on GPUs with FP8 units.

    If a step has many tokens, activations are quantized too (W8A8).
    """

    quantizes_activations = True


class StackedWeight(ScaledWeight):
    """Holds the stacked weights of a rank's experts: `gate_up_proj` or `down_proj`."""

    def __init__(self, shape: tuple[int, ...], scheme: QuantScheme, block: Block, experts: Experts, shard_ids: tuple):
        self.first_expert, self.num_local = experts.first_expert, experts.num_local
        self.num_experts = experts.num_experts
        self.shards = {shard_id: experts.shard(shard_id) for shard_id in shard_ids}
        super().__init__(shape, scheme, block, self._select)

    def _select(self, expert: int, shard_id: int) -> tuple[Shard, tuple[int, ...]] | None:
        index = expert - self.first_expert
        return (self.shards[shard_id], (index,)) if 0 <= index < self.num_local else None

    def _load_values(self, values: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Load one expert's weight. If `arguments` is empty, load the unquantized weights of all experts."""
        if arguments:
            return super()._load_values(values, weight, *arguments)
        if not self.must_quantize(weight):
            raise ValueError("quantized experts in one tensor are not supported: each needs tensors of its own")
        sizes = [shard.shape[0] for shard in self.shards.values()]
        weight = check_shape(weight, (self.num_experts, sum(sizes), next(iter(self.shards.values())).shape[1]))
        for index in range(self.num_local):
            of_expert = weight[self.first_expert + index]
            for shard, part in zip(self.shards.values(), of_expert.split(sizes)):
                self.quantize_shard(part, shard, (index,))
        return self.scales.data[: self.num_local]  # a shared expert is loaded separately

"""Stores adapters on a rank's device, for the linear layers and experts of a model."""

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.fused.fused_linear import UNQUANTIZED, MultipliesByFormat
from nanovllm.kernels.activations import SWIGLU, activation_of
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.lora.expert_files import PROJECTIONS, ExpertsShape
from nanovllm.lora.lora_experts import adapt_experts
from nanovllm.lora.lora_linear import LoRAFormat, LoRAStack
from nanovllm.moe.experts import DOWN, GATE, UP, Experts, Router
from nanovllm.utils.loader import stored_modules
from nanovllm.utils.merged_tensors import WHOLE
from nanovllm.utils.replace import replace_methods


class Target(NamedTuple):
    """Describes a module of the checkpoint that can have an adapter, and the module's place in the model.

    A module that merges several layers has one part for each layer. All experts of a layer share one module for each
    projection.
    """

    stack: LoRAStack
    shards: list[tuple[int, Any]]  # the index of each part in the layer, and the part's Shard or RowRanges
    num_experts: int = 1  # of all ranks; 1 for linear layers
    first_expert: int = 0  # of this rank

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of the whole module, of which each rank has a part."""
        sizes = [shard.shape for _, shard in self.shards]
        return sizes[0][1], sum(size[0] for size in sizes)

    def write(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Write an adapter to a slot: this rank's parts of A [experts, rank, inputs] and B [experts, outputs, rank]."""
        stack, rank, begin = self.stack, a.shape[1], 0
        of_rank = slice(self.first_expert, self.first_expert + stack.experts)
        of_slot = slice(slot * stack.experts, (slot + 1) * stack.experts)
        a, b = a[of_rank], b[of_rank]
        for part, shard in self.shards:
            stack.a[of_slot, part, :rank].copy_(a[..., shard.parts[0].columns], non_blocking=True)
            for piece in shard.parts:
                rows = b[:, begin : begin + shard.shape[0]][:, piece.rows]
                target = stack.b[of_slot, piece.first_row : piece.first_row + rows.shape[1], :rank]
                target.copy_(rows, non_blocking=True)
            begin += shard.shape[0]


class AdapterStacks:
    """Holds the adapters on a rank's device.

    targets: the modules of the checkpoint that can have an adapter, by name, in the same order on all ranks.
    experts: the sizes of each mixture of experts, by name. The projections of experts are the last targets.
    slots_of_requests: the adapter slot of each request index, or -1 if the request has no adapter. The last entry of
        `slots_of_requests` is for padding rows.
    """

    def __init__(self, model: Any, config: Config, device: torch.device):
        """Allocate memory for adapters of all linear layers and experts, and replace the layers' formats."""
        self._slots, self._dtype = config.max_loras, config.model_config.dtype
        self._int32: Any = dict(dtype=torch.int32, device=device)
        self.slots_of_requests = torch.full((config.max_num_seqs + 1,), -1, **self._int32)
        layers = [*_adaptable(model)]
        mixtures = [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]
        # the adapters' ranks are in one table for all layers, so that a single copy stores all ranks of an adapter
        num_columns = sum(len(layer.shard_ids()) for _, layer in layers) + len(PROJECTIONS) * len(mixtures)
        self._ranks = torch.zeros(self._slots, num_columns, **self._int32)
        self._columns: list[int] = []  # for each column of the table, the index of its target
        self.targets: dict[str, Target] = {}
        for path, layer in layers:
            shard_ids = layer.shard_ids()
            shards: list[Any] = [layer.shard(*shard_id) for shard_id in shard_ids]
            stack = self._allocate(shards, config.max_lora_rank)
            owners: dict[int, int] = {}
            for name, shard_id in stored_modules(path, layer, model.packed_modules_mapping).items():
                is_whole = shard_id in ([], [WHOLE])
                parts = [*range(len(shards))] if is_whole else [shard_ids.index(tuple(shard_id))]
                owners |= dict.fromkeys(parts, len(self.targets))
                self.targets[name] = Target(stack, [(part, shards[part]) for part in parts])
            self._columns += [owners[part] for part in range(len(shards))]
            base = getattr(layer, "format", UNQUANTIZED)
            layer.format = LoRAFormat(base, stack, self.slots_of_requests)  # type: ignore[assignment]
            if type(layer).multiply is LinearBase.multiply:
                replace_methods(layer, MultipliesByFormat, "Adapted")
        self.shapes = {name: target.shape for name, target in self.targets.items()}
        self.experts: dict[str, ExpertsShape] = {}
        for path, experts in mixtures:
            sizes = experts.num_experts, experts.hidden_size, experts.size, experts.alternates
            self.experts[path] = ExpertsShape(*sizes)
            self._add_experts(path, experts, config.max_expert_lora_rank)

    def _add_experts(self, path: str, experts: Experts, max_rank: int) -> None:
        stacks = []
        for shard_ids in ((GATE, UP), (DOWN,)):
            shards = [experts.shard(shard_id) for shard_id in shard_ids]
            stacks.append(stack := self._allocate(shards, max_rank, experts.num_local))
            for part, (shard_id, shard) in enumerate(zip(shard_ids, shards)):
                self._columns.append(len(self.targets))
                target = Target(stack, [(part, shard)], experts.num_experts, experts.first_expert)
                self.targets[f"{path}.{PROJECTIONS[shard_id]}"] = target
        if max_rank:
            adapt_experts(experts, *stacks, self.slots_of_requests)

    def _allocate(self, shards: list[Any], max_rank: int, num_experts: int = 1) -> LoRAStack:
        """Allocate the adapters of a layer that consists of `shards`.

        The next columns of the table `_ranks` hold the adapter ranks of `shards`.
        """
        inputs, outputs = _local_sizes(shards)
        begin, rows = len(self._columns), self._slots * num_experts
        ends = [*(shard.first_row for shard in shards[1:]), outputs]
        return LoRAStack(
            torch.empty(rows, len(shards), max_rank, inputs, dtype=self._dtype, device=self._int32["device"]),
            torch.empty(rows, outputs, max_rank, dtype=self._dtype, device=self._int32["device"]),
            self._ranks[:, begin : begin + len(shards)],
            torch.tensor(ends, **self._int32),
            max(end - start for start, end in zip([0, *ends], ends)),
            num_experts,
            gcd(64, *ends),  # 64 is enough for wide loads, and for `adapted_linear`
        )

    @torch.inference_mode()
    def write(self, slot: int, ranks: list[int], weights: torch.Tensor) -> None:
        begin = 0
        for rank, target in zip(ranks, self.targets.values(), strict=True):
            if rank:
                (inputs, outputs), num_experts = target.shape, target.num_experts
                sizes = num_experts * rank * inputs, num_experts * outputs * rank
                a, b = weights[begin : begin + sum(sizes)].split(sizes)
                target.write(slot, a.view(num_experts, rank, inputs), b.view(num_experts, outputs, rank))
                begin += sum(sizes)
        self._ranks[slot] = torch.tensor([ranks[i] for i in self._columns], dtype=torch.int32)


def _local_sizes(shards: list[Any]) -> tuple[int, int]:
    """Return how many of a layer's inputs and outputs belong to this rank.

    The shape of the weight may differ from the returned sizes, because the weight may be quantized.
    """
    first = shards[0].parts[0]
    rows = (len(range(piece.shape[0])[piece.rows]) for shard in shards for piece in shard.parts)
    return len(range(first.shape[1])[first.columns]), sum(rows)


def add_adapters(model: Any, config: Config, device: torch.device) -> None:
    """Prepare a loaded model for adapters. The output head and routers can't have adapters."""
    model.adapters = AdapterStacks(model, config, device)
    for module in model.modules():
        is_swiglu = activation_of(getattr(module, "act_fn", None)) == SWIGLU
        if is_swiglu and isinstance(getattr(getattr(module, "down_proj", None), "format", None), LoRAFormat):
            module.act_fn = SiluAndMul()  # the old activation might quantize its output, which A can't multiply


def _adaptable(model: nn.Module) -> Iterator[tuple[str, LinearBase]]:
    """Yield the path and module of each linear layer that can have an adapter."""
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and not isinstance(module, Router):
            yield path, module

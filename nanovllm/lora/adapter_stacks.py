"""Stores adapters on a rank's device, for the linear layers of a model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.fused.fused_linear import UNQUANTIZED, is_swiglu
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.lora.lora_linear import Adapted, LoRAFormat, LoRAStack
from nanovllm.moe.experts import MoE, Router
from nanovllm.utils.loader import stored_modules
from nanovllm.utils.merged_tensors import WHOLE
from nanovllm.utils.replace import replace_methods


class Target(NamedTuple):
    """A module of the checkpoint that can have an adapter, and its place in the model.

    A module has several parts if the checkpoint stores several layers as one merged module.
    """

    stack: LoRAStack
    shards: list[tuple[int, Any]]  # the index of each part in the layer, and the part's Shard or RowRanges

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of the whole module, before it is split among the ranks."""
        sizes = [shard.shape for _, shard in self.shards]
        return sizes[0][1], sum(size[0] for size in sizes)

    def write(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy this rank's parts of A [rank, inputs] and B [outputs, rank] to a slot."""
        rank, begin = len(a), 0
        for part, shard in self.shards:
            self.stack.a[slot, part, :rank].copy_(a[:, shard.parts[0].columns], non_blocking=True)
            for piece in shard.parts:
                rows = b[begin : begin + shard.shape[0]][piece.rows]
                target = self.stack.b[slot, piece.first_row : piece.first_row + len(rows), :rank]
                target.copy_(rows, non_blocking=True)
            begin += shard.shape[0]


class AdapterStacks:
    """The adapters on a rank's device.

    targets: the modules of the checkpoint that can have an adapter, by name, in the same order on all ranks.
    slots_of_requests: the slot of each request index, or -1 without an adapter. The last entry is for padding rows.
    """

    def __init__(self, model: Any, config: Config, device: torch.device):
        """Allocate memory for adapters of all linear layers, and replace the layers' formats."""
        slots, dtype = config.max_loras, config.model_config.dtype
        int32: Any = dict(dtype=torch.int32, device=device)
        self.slots_of_requests = torch.full((config.max_num_seqs + 1,), -1, **int32)
        layers = [*_adaptable(model)]
        # the adapters' ranks are in one table for all layers, so that a single copy stores all ranks of an adapter
        self._ranks = torch.zeros(slots, sum(len(layer.shard_ids()) for _, layer in layers), **int32)
        self._columns: list[int] = []  # for each column of the table, the index of its target
        self.targets: dict[str, Target] = {}
        for path, layer in layers:
            shard_ids = layer.shard_ids()
            shards: list[Any] = [layer.shard(*shard_id) for shard_id in shard_ids]
            inputs, outputs = _local_sizes(shards)
            rank, begin = config.max_lora_rank, len(self._columns)
            ends = [*(shard.first_row for shard in shards[1:]), outputs]
            stack = LoRAStack(
                torch.empty(slots, len(shards), rank, inputs, dtype=dtype, device=device),
                torch.empty(slots, outputs, rank, dtype=dtype, device=device),
                self._ranks[:, begin : begin + len(shards)],
                torch.tensor(ends, **int32),
                max(end - start for start, end in zip([0, *ends], ends)),
            )
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
                replace_methods(layer, Adapted, "Adapted")

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: target.shape for name, target in self.targets.items()}

    @torch.inference_mode()
    def write(self, slot: int, ranks: list[int], weights: torch.Tensor) -> None:
        begin = 0
        for rank, target in zip(ranks, self.targets.values(), strict=True):
            if rank:
                inputs, outputs = target.shape
                end = begin + rank * inputs
                a, b = weights[begin:end].view(rank, inputs), weights[end : end + outputs * rank].view(outputs, rank)
                target.write(slot, a, b)
                begin = end + outputs * rank
        self._ranks[slot] = torch.tensor([ranks[i] for i in self._columns], dtype=torch.int32)


def _local_sizes(shards: list[Any]) -> tuple[int, int]:
    """Return how many inputs and outputs of a layer this rank has.

    The shape of the weight does not show these numbers, because some formats store weights in other shapes.
    """
    first = shards[0].parts[0]
    rows = (len(range(piece.shape[0])[piece.rows]) for shard in shards for piece in shard.parts)
    return len(range(first.shape[1])[first.columns]), sum(rows)


def add_adapters(model: Any, config: Config, device: torch.device) -> None:
    """Prepare a loaded model's linear layers for adapters, except for the output head, experts and routers."""
    model.adapters = AdapterStacks(model, config, device)
    for module in model.modules():
        act = getattr(module, "act_fn", None)
        if isinstance(getattr(getattr(module, "down_proj", None), "format", None), LoRAFormat) and is_swiglu(act):
            module.act_fn = SiluAndMul()  # the old activation might quantize its output, which A can't multiply


def _adaptable(model: nn.Module) -> Iterator[tuple[str, LinearBase]]:
    """Yield the path and module of each linear layer that can have an adapter."""
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    # leave out shared experts that a kernel computes together with the other experts
    left_out = {part for moe in mixtures if moe.num_shared for part in moe.shared_expert.modules()}
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and not isinstance(module, Router) and module not in left_out:
            yield path, module

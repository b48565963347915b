"""Adds the results of low-rank adapters to the results of linear layers.

A layer's adapter computes B (A x), where A is [rank, inputs] and B is [outputs, rank]. The rows of a step may have
different adapters, or none. Each layer that the checkpoint stores separately has its own A and B.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.fused.fused_linear import WeightFormat
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.utils.context import get_context, of_tokens


class LoRAStack(NamedTuple):
    """The adapters of a layer, stacked by slot. R is the setting `max_lora_rank`.

    A mixture of experts has a row of matrices for each slot and expert: row `slot * experts + expert`.
    """

    a: torch.Tensor  # [slots * experts, parts, R, inputs]
    b: torch.Tensor  # [slots * experts, outputs, R], times the scale of the adapter
    ranks: torch.Tensor  # [slots, parts] int32, on the device; 0: the adapter does not change this part
    ends: torch.Tensor  # [parts] int32: the index after a part's last output
    max_outputs: int  # of a part
    experts: int = 1  # of this rank

    @property
    def device(self) -> torch.device:
        return self.a.device


@operation
def group_rows(slots: torch.Tensor, num_slots: int) -> Any:
    """Return the rows of each slot for `add_lora`.

    In `slots` [T] int32, negative values mark rows without an adapter. For experts, `slot * experts + expert` takes the
    place of a slot. This definition returns pairs of a slot and the indices of its rows.
    """
    present = [slot for slot in slots.unique().tolist() if slot >= 0]
    return [(slot, (slots == slot).nonzero().flatten()) for slot in present]


@operation
def add_lora(y: torch.Tensor, x: torch.Tensor, stack: LoRAStack, groups: Any) -> None:
    """Add B (A x) of each row's adapter to y [T, outputs] in place, for x [T, inputs]."""
    for slot, rows in groups:
        begin = 0
        for part, (rank, end) in enumerate(zip(stack.ranks[slot // stack.experts].tolist(), stack.ends.tolist())):
            if rank:
                h = F.linear(x[rows], stack.a[slot, part, :rank])
                y[rows, begin:end] += F.linear(h, stack.b[slot, begin:end, :rank])
            begin = end


class LoRAFormat(WeightFormat):
    def __init__(self, base: WeightFormat, stack: LoRAStack, slots_of_requests: torch.Tensor):
        self.base, self.stack, self.slots_of_requests = base, stack, slots_of_requests

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        y = self.base.linear(layer, x, bias, split_k, out)
        self._add(y if split_k == 1 else y[0], x)
        return y

    def norm_linear(self, layer: LinearBase, x: NormInput, act: SiluAndMul | None) -> Any:
        y = self.linear(layer, x.tensor(), layer.bias)  # the adapters need the normalized input, too
        return y if act is None else act(y)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        return self.base.best_split_k(layer, x, max_split_k)

    def factors(self, layer: LinearBase, x: NormInput) -> None:
        """Return None, because only `linear` and `norm_linear` add the results of adapters."""

    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        plans = get_context().plans  # the plans of this step; the first layer of the step makes the groups
        if (groups := plans.get(LoRAFormat)) is None:
            slots = of_tokens(self.slots_of_requests)
            groups = plans[LoRAFormat] = group_rows(slots, len(self.stack.a))
        add_lora(y, x, self.stack, groups)


class Adapted:
    """Replaces `LinearBase.multiply` in layers that can have adapters."""

    def multiply(self: Any, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self.format.linear(self, x, bias)

"""Adds the results of low-rank adapters to the results of linear layers.

A layer's adapter computes B (A x), where A is [rank, inputs] and B is [outputs, rank]. The rows of a step may have
different adapters, or none. The layers in a merged module have separate matrices A and B.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.fused.fused_linear import WeightFormat, split_linear
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels import operation
from nanovllm.kernels.activations import SWIGLU, activation_of
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.linear import LinearBase
from nanovllm.utils.context import get_context, of_tokens


class LoRAStack(NamedTuple):
    """Holds the adapters of a layer, stacked by slot. R is the setting `max_lora_rank`.

    A mixture of experts has a pair of matrices for each slot and expert, at index `slot * experts + expert`.
    """

    a: torch.Tensor  # [slots * experts, parts, R, inputs]
    b: torch.Tensor  # [slots * experts, outputs, R], times the scale of the adapter
    ranks: torch.Tensor  # [slots, parts] int32, on the device; 0: the adapter does not change this part
    ends: torch.Tensor  # [parts] int32: the index after a part's last output
    max_outputs: int  # of a part
    experts: int = 1  # of this rank
    alignment: int = 1  # a power of two that divides the numbers of outputs of all parts

    @property
    def device(self) -> torch.device:
        return self.a.device


@operation
def group_rows(slots: torch.Tensor, num_slots: int) -> Any:
    """Group rows by slot, for `add_lora`. `slots` [T] int32 contains each row's slot.

    In plain PyTorch, the result is a list of pairs (slot, row indices).
    """
    present = [slot for slot in slots.unique().tolist() if slot >= 0]
    return [(slot, (slots == slot).nonzero().flatten()) for slot in present]


class StepAdapters:
    """Holds the adapter slots of a step's rows.

    slots: [T] int32, negative for rows without an adapter. In a mixture of experts, `slot * experts + expert` takes the
        place of a slot.
    """

    def __init__(self, slots: torch.Tensor, num_slots: int):
        self.slots, self._num_slots = slots, num_slots
        self.unready: torch.Tensor | None = None  # memory that kernels of this step have not taken yet

    @cached_property
    def groups(self) -> Any:
        return group_rows(self.slots, self._num_slots)


@operation
def add_lora(
    y: torch.Tensor, x: torch.Tensor, stack: LoRAStack, rows: StepAdapters, gated: bool = False
) -> torch.Tensor:
    """Add B (A x) of each row's adapter to y [T, outputs] in place. x is [T, inputs]. Return y.

    If `gated` is True, return `silu_and_mul(y)` instead of y.
    """
    for slot, indices in rows.groups:
        begin = 0
        for part, (rank, end) in enumerate(zip(stack.ranks[slot // stack.experts].tolist(), stack.ends.tolist())):
            if rank:
                h = F.linear(x[indices], stack.a[slot, part, :rank])
                y[indices, begin:end] += F.linear(h, stack.b[slot, begin:end, :rank])
            begin = end
    return silu_and_mul(y) if gated else y


@operation
def adapted_linear(
    x: torch.Tensor | NormInput,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stack: LoRAStack,
    rows: StepAdapters,
    gated: bool = False,
    split_k: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `split_linear` and `add_lora`.

    If `split_k` > 1, the first partial sum contains the results of the adapters.
    """
    x = x.tensor() if isinstance(x, NormInput) else x
    y = split_linear(x, weight, bias, split_k, out)
    return _added(y, x, stack, rows, gated, split_k)


def _added(
    y: torch.Tensor, x: torch.Tensor, stack: LoRAStack, rows: StepAdapters, gated: bool, split_k: int
) -> torch.Tensor:
    if split_k == 1:
        return add_lora(y, x, stack, rows, gated)
    add_lora(y[0], x, stack, rows)
    return y


class LoRAFormat(WeightFormat):
    def __init__(self, base: WeightFormat, stack: LoRAStack, slots_of_requests: torch.Tensor):
        self.base, self.stack, self.slots_of_requests = base, stack, slots_of_requests

    def linear(self, layer: LinearBase, x: Any, bias=None, split_k: int = 1, out=None) -> torch.Tensor:
        return self._compute(layer, x, bias, split_k=split_k, out=out)

    def norm_linear(self, layer: LinearBase, x: NormInput, act: nn.Module | None) -> Any:
        gated = activation_of(act) == SWIGLU and len(self.stack.ends) == 2
        y = self._compute(layer, x, layer.bias, gated)
        return y if act is None or gated else act(y)

    def _compute(self, layer: LinearBase, x: Any, bias, gated: bool = False, split_k: int = 1, out=None) -> Any:
        if type(self.base) is WeightFormat:
            return adapted_linear(x, layer.weight, bias, self.stack, self._rows(), gated, split_k, out)
        x = x.tensor() if isinstance(x, NormInput) else x  # the adapters need the normalized input, too
        y = self.base.linear(layer, x, bias, split_k, out)
        return _added(y, x, self.stack, self._rows(), gated, split_k)

    def best_split_k(self, layer: LinearBase, x: Any, max_split_k: int) -> int:
        return self.base.best_split_k(layer, x, max_split_k)

    def factors(self, layer: LinearBase, x: NormInput) -> None:
        """Return None, because a fused kernel would compute this matmul without the adapter's result."""

    def _rows(self) -> StepAdapters:
        plans = get_context().plans  # the plans of this step, made in the first layer of the step
        if (rows := plans.get(LoRAFormat)) is None:
            rows = plans[LoRAFormat] = StepAdapters(of_tokens(self.slots_of_requests), len(self.stack.a))
        return rows

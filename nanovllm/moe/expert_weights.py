"""Loads experts from checkpoints that do not stack the tensors of experts, or that use stacks of another layout."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn


def split_experts(loaders: dict[str, tuple[Callable, list[int]]], model: nn.Module, stored: Collection[str]) -> None:
    """If the checkpoint has no stacked experts, replace the loaders of stacks with loaders for single experts.

    `loaders` comes from `weight_loaders`, and `stored` contains the names of the checkpoint's tensors.
    """
    for path, experts in model.named_modules():
        if not hasattr(experts, "tensors_of_experts"):
            continue
        stacked = [f"{path}.{name}" for name, _ in experts.named_parameters()]
        if not any(name in stored for name in stacked):
            for name in stacked:
                del loaders[name]
            for name, (parameter, shard_id) in experts.tensors_of_experts().items():
                loaders[f"{path}.{name}"] = partial(parameter.weight_loader, parameter), [*shard_id]


def load_alternating(load: Callable, name: str, stack: Any) -> torch.Tensor | None:
    """Load a stack of weights [experts, inputs, outputs] or biases [experts, outputs].

    In an unquantized stack, outputs of the gate projection alternate with outputs of the up projection. The stack is
    passed to `load` in the layout that Experts uses. A quantized stack is passed to `load` unchanged.
    """
    if callable(stack) or not name.endswith(("_proj", "_proj_bias")):
        return load(stack)
    outputs_last = stack[...]
    if name.startswith("gate_up"):
        outputs_last = torch.cat((outputs_last[..., ::2], outputs_last[..., 1::2]), -1)
    return load(outputs_last.transpose(1, -1))

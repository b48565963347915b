"""Loads the weights of experts from checkpoints that have a tensor for each expert instead of stacked tensors."""

from collections.abc import Callable, Collection
from functools import partial

from torch import nn


def split_experts(loaders: dict[str, tuple[Callable, list[int]]], model: nn.Module, stored: Collection[str]) -> None:
    """Replace loaders of stacked experts by loaders of each expert's tensors, if the checkpoint has no stacked tensors.

    `loaders` is the result of `weight_loaders`; `stored` are the names of the tensors in the checkpoint.
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

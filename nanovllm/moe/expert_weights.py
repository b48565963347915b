"""Weights of a mixture of experts, which a checkpoint has for all experts together or for each. Imported for those."""

from collections.abc import Callable, Collection
from functools import partial

from torch import nn


def split_experts(loaders: dict[str, tuple[Callable, list[int]]], model: nn.Module, stored: Collection[str]) -> None:
    """Replace loaders of stacked experts by those of each expert's tensors where the checkpoint has no stacked ones.

    `loaders` are those of `weight_loaders`, and `stored` are the names in the checkpoint.
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

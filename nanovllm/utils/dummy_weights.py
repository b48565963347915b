"""Makes random weights for the setting `load_format="dummy"`."""

import zlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

BOUND = 0.035  # the uniform distribution then has standard deviation 0.02, the usual initializer_range


def load_dummy(model: nn.Module, loaders: Mapping[str, tuple[Callable, list]]) -> None:
    """Load small random numbers.

    The numbers in a tensor depend only on the tensor's name, so all ranks have the same model. `loaders` come from
    `utils.loader.weight_loaders`.
    """

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=like.dtype, device=like.device)
        return values.uniform_(-BOUND, BOUND, generator=generator)

    like = next(model.parameters())
    for name, (load, shard_id) in loaders.items():
        load(partial(draw, name), *shard_id)

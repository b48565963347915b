"""Loads merged tensors. A merged tensor stores all parts of a merged layer, such as q, k and v."""

from collections.abc import Callable
from typing import Any

import torch

WHOLE = "whole"  # the shard id of such a tensor in `packed_modules_mapping`


class RowsOf:
    """Some rows of a safetensors slice. The rows are read when this object is indexed."""

    def __init__(self, weight: Any, first: int, end: int):
        self._weight, self._first, self._num_rows = weight, first, end - first
        self.get_dtype = weight.get_dtype

    def get_shape(self) -> list[int]:
        return [self._num_rows, *self._weight.get_shape()[1:]]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self._num_rows)
        return self._weight[(slice(self._first + start, self._first + stop), *columns)]


def load_whole(load: Callable, layer: Any, weight) -> torch.Tensor | None:
    """Load a merged tensor (a weight, a bias or scales), which contains a merged layer's parts in order.

    load: the parameter's `weight_loader`, which takes a part and its shard id.

    If there is a single scale, all parts use this scale. Return a tensor with the smallest and the largest value of
    each part. If `load` returns None, return None.
    """
    sizes, bounds, first = layer.output_sizes, [], 0
    for shard_id, size in zip(layer.shard_ids(), sizes, strict=True):
        part, first = _rows(weight, first, size, sum(sizes))
        filled = load(part, *shard_id)
        bounds += [] if filled is None else filled.aminmax()
    return torch.stack(bounds) if bounds else None


def _rows(weight: Any, first: int, size: int, total: int) -> tuple[Any, int]:
    """Return a part of `weight`, and the row where the following part begins.

    The part begins at row `first`, and covers `size` of the layer's `total` outputs.
    """
    if callable(weight):  # random numbers of any shape
        return weight, first
    shape = list(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())
    if shape in ([], [1]):
        return weight, first
    num_rows, remainder = divmod(size * shape[0], total)
    if remainder:
        raise ValueError(
            f"the checkpoint has shape {shape}, whose rows can't be divided into {size} of {total} outputs"
        )
    end = first + num_rows
    return weight[first:end] if isinstance(weight, torch.Tensor) else RowsOf(weight, first, end), end

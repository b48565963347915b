"""Layers that keep a state of fixed size for each sequence, whatever its length."""

from typing import Any, NamedTuple

import torch


class State:
    """The states of one layer: `tensors`, each [rows, *shape].

    A row belongs to the running sequence with that request index. `Context.state_rows` says which rows a step reads and
    writes: a layer computes the tokens of the i-th sequence from row `state_rows[0, i]`, which may be a snapshot or
    zeros, and writes its state after the last of them to row `state_rows[1, i]`. Padding has a row of its own.
    """

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = [tensor[0] for tensor in tensors]


class StateSpec(NamedTuple):
    """The spec of a layer with a state: the shape and the dtype of each of its tensors."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    of_states = True

    def tensors(self, num_layers: int, num_blocks: int, config: Any) -> tuple[torch.Tensor, ...]:
        rows = num_rows(config)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(torch.empty((1, num_layers, rows, *shape), dtype=dtype, device="meta") for shape, dtype in pairs)

    def make(self, parts: list[torch.Tensor], config: Any) -> State:
        return State(*parts)


def num_rows(config: Any) -> int:
    """Rows for running sequences, padding and zeros, and as many snapshots for prefix hits as running sequences."""
    return config.max_num_seqs * (1 + config.enable_prefix_caching) + 2

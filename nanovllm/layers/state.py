"""Layers that keep a state of fixed size for each sequence, whatever its length; and what layers keep in general.

A layer with a method `cache_spec()` gets its part of the engine's memory as `layer.cache`. The ModelRunner allocates
groups of layers with the same spec. That is a `PagedKV` (layers/attention.py), a `PagedHidden` (models/heads.py) or a
`StateSpec`, with:

- `of_states`: whether it is of one state for a sequence, and not of blocks of tokens
- `make(parts, config)`: the `layer.cache` that has these parts of each tensor
- `tensors(num_layers, num_blocks, config)`: what all layers of the group have, on the meta device. Dimension 1 is the
  layers, dimension 2 the blocks or the states.

| what happens to a sequence | keys and values in blocks | a state (engine/state_blocks.py) |
| --- | --- | --- |
| prefix hit | it shares the blocks that are found | up to a snapshot, which its first chunk reads |
| fork | it shares full blocks, and copies the last one | it copies the state |
| preemption | its blocks are freed; the full ones can be found again | its state is lost; a snapshot can be found |
| drafts | those that were wrong are overwritten | has none; those that were right are computed again in the next step |
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class KeptDrafts(NamedTuple):
    """What a layer writes beside its states to compute the drafts of a step again in the next, if they were right.

    No draft is in a state, as it may be wrong.
    """

    inputs: torch.Tensor  # [rows, k, draft_size], of the last step's drafts
    num_tokens: torch.Tensor  # [rows] int32: how many tokens of the sequence are in its state


class State:
    """The states of one layer: `tensors`, each [rows, *shape].

    A row belongs to the running sequence with that request index. `Context.state_rows` says which rows a step reads and
    writes: a layer computes the tokens of the i-th sequence from row `state_rows[0, i]`, which may be a snapshot or
    zeros, and writes its state after the last of them to row `state_rows[1, i]`. Padding has a row of its own.

    `kept_drafts` is there with `speculative_config`.
    """

    def __init__(self, *tensors: torch.Tensor, kept_drafts: Sequence[torch.Tensor] = ()):
        self.tensors = [tensor[0] for tensor in tensors]
        self.kept_drafts = KeptDrafts(*(tensor[0] for tensor in kept_drafts)) if kept_drafts else None

    def count_tokens(self, read: Any, written: Any, number: int) -> None:
        """The states in rows `written` have so many tokens more than those in rows `read`, and no drafts after them."""
        if self.kept_drafts is not None:
            self.kept_drafts.num_tokens[written] = self.kept_drafts.num_tokens[read] + number


class StateSpec(NamedTuple):
    """The spec of a layer with a state: the shape and the dtype of each of its tensors."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    draft_size: int = 0  # numbers of the first dtype that it keeps of each draft; 0: it can't be used with drafts
    of_states = True

    def tensors(self, num_layers: int, num_blocks: int, config: Any) -> tuple[torch.Tensor, ...]:
        rows, pairs = num_rows(config), [*zip(self.shapes, self.dtypes, strict=True)]
        if (speculative := config.speculative_config) is not None:
            pairs += [((speculative.num_speculative_tokens, self.draft_size), self.dtypes[0]), ((), torch.int32)]
        return tuple(torch.empty((1, num_layers, rows, *shape), dtype=dtype, device="meta") for shape, dtype in pairs)

    def make(self, parts: list[torch.Tensor], config: Any) -> State:
        n = len(self.shapes)
        return State(*parts[:n], kept_drafts=parts[n:])


def num_rows(config: Any) -> int:
    """Rows for running sequences, padding and zeros, and as many snapshots for prefix hits as running sequences."""
    return config.max_num_seqs * (1 + config.enable_prefix_caching) + 2


def fit_states(runner: Any) -> int:
    """The number of rows, for a ModelRunner whose model is loaded.

    States take at most half of the memory for the cache, for which `max_num_seqs` is lowered, to 1 at least. It stays
    as it is if `num_kvcache_blocks` is set: then the cache has the size that the caller wants.
    """
    config = runner.config
    if config.num_kvcache_blocks is None:
        groups = [(spec, len(layers)) for spec, layers in runner.cache_groups.items() if spec.of_states]
        num_bytes = sum(x.nbytes for spec, n in groups for x in spec.tensors(n, 0, config)) // num_rows(config)
        num_fitting = runner.cache_budget() // 2 // num_bytes
        num_seqs = runner.min_of_ranks((num_fitting - 2) // (1 + config.enable_prefix_caching))
        config.resolve(max_num_seqs=max(1, min(config.max_num_seqs, num_seqs)))
    return num_rows(config)

"""Layers that keep a state of fixed size for each sequence, whatever its length; and what layers keep in general.

A layer with a method `cache_spec()` gets its part of the engine's memory as `layer.cache`. The ModelRunner allocates
groups of layers with the same spec. That is an `AttentionSpec` (cache/kv_cache.py), a `PagedHidden`
(models/head_models.py) or a `StateSpec`, with:

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

NUM_FIXED = 2  # rows that are not for sequences or snapshots: of padding, and of zeros


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

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        rows, pairs = config.num_states + NUM_FIXED, [*zip(self.shapes, self.dtypes, strict=True)]
        if (speculative := config.speculative_config) is not None:
            pairs += [((speculative.num_speculative_tokens, self.draft_size), self.dtypes[0]), ((), torch.int32)]
        return tuple(torch.empty((1, num_layers, rows, *shape), dtype=dtype, device="meta") for shape, dtype in pairs)

    def make(self, parts: list[torch.Tensor], config: "Config") -> State:
        n = len(self.shapes)
        return State(*parts[:n], kept_drafts=parts[n:])


def fit_states(runner: "ModelRunner") -> None:
    """Set how many states there are, and how many sequences may run, for a ModelRunner whose model is loaded.

    There is a state for each of `max_num_seqs`, and one for a snapshot of each if prefixes are cached. If
    `num_kvcache_blocks` is not set, all states take at most half of the memory for the cache. If so many do not fit,
    sequences may have three quarters of them, and `max_num_seqs` is lowered, to 1 at least.
    """
    config, has_snapshots = runner.config, runner.config.enable_prefix_caching
    num_seqs, num_states = config.max_num_seqs, config.max_num_seqs * (1 + has_snapshots)
    if config.num_kvcache_blocks is None:
        groups = [(spec, len(layers)) for spec, layers in runner.cache_groups.items() if spec.of_states]
        num_bytes = sum(x.nbytes for spec, n in groups for x in spec.tensors(n, 0, config)) // NUM_FIXED
        num_fitting = runner.min_of_ranks(runner.cache_budget() // 2 // num_bytes - NUM_FIXED)
        num_states = max(1 + has_snapshots, min(num_states, num_fitting))
        num_seqs = min(num_seqs, num_states - (1 + num_states // 4) * has_snapshots)
    config.resolve(max_num_seqs=num_seqs, num_states=num_states)

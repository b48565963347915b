"""What layers keep between steps, and layers that keep a state: tensors of a fixed size for each sequence.

A layer with a method `cache_spec()` gets its part of the engine's memory as `layer.cache`. Layers with equal specs form
a group, which the ModelRunner allocates together. A spec is an `AttentionSpec` (cache/kv_cache.py), a `PagedHidden`
(models/head_models.py) or a `StateSpec`. Each has:

- `of_states`: True for one state per sequence, False for blocks of tokens
- `tensors(num_layers, num_blocks, config)`: the tensors of the whole group, on the meta device. Dimension 1 is the
  layer, dimension 2 the block or the state.
- `make(parts, config)`: the `layer.cache`, made of the layer's part of each tensor

| what happens to a sequence | keys and values in blocks | a state (engine/state_blocks.py) |
| --- | --- | --- |
| prefix hit | it shares the blocks that are found | only up to a snapshot, which its first chunk reads |
| fork | it shares full blocks, and copies the last one | it copies the state |
| preemption | its blocks are freed; the full ones can be found again | its state is lost; a snapshot can be found |
| drafts | wrong ones are overwritten | drafts never enter it; the next step computes right ones again |
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

NUM_FIXED = 2  # rows for padding and for zeros, besides those of sequences and snapshots


class KeptDrafts(NamedTuple):
    """What a layer keeps of a step's drafts, so that the next step can compute the right ones into the state.

    No draft enters a state at once, because it may be wrong.
    """

    inputs: torch.Tensor  # [rows, k, draft_size]: what the layer needs of each of the last step's k drafts
    num_tokens: torch.Tensor  # [rows] int32: tokens of the sequence that its state contains


class State:
    """The states of one layer: `tensors`, each [rows, *shape].

    A running sequence has the row of its request index. `Context.state_rows` says which rows a step reads and
    writes: a layer computes the tokens of the i-th sequence from row `state_rows[0, i]`, which may be a snapshot or
    zeros, and writes the state after them to row `state_rows[1, i]`. Padding has a separate row.

    `kept_drafts` is None without `speculative_config`.
    """

    def __init__(self, *tensors: torch.Tensor, kept_drafts: Sequence[torch.Tensor] = ()):
        self.tensors = [tensor[0] for tensor in tensors]
        self.kept_drafts = KeptDrafts(*(tensor[0] for tensor in kept_drafts)) if kept_drafts else None

    def count_tokens(self, read: Any, written: Any, number: int) -> None:
        """Note that the states in rows `written` have `number` tokens more than those in rows `read`, and no drafts."""
        if self.kept_drafts is not None:
            self.kept_drafts.num_tokens[written] = self.kept_drafts.num_tokens[read] + number


class StateSpec(NamedTuple):
    """The spec of a layer with a state: the shape and the dtype of each of its tensors."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    draft_size: int = 0  # numbers of the first dtype that a layer keeps of each draft; 0: it can't be used with drafts
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
    """Set `Config.num_states` and lower `Config.max_num_seqs`, for a ModelRunner whose model is loaded.

    There is a state for each of `max_num_seqs` sequences and, with the prefix cache, another for a snapshot. If
    `num_kvcache_blocks` is set, they take as much memory as they need. Otherwise they take at most half of the cache's
    memory. If they don't all fit, sequences get at most three quarters of those that do, and `max_num_seqs` is lowered.
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

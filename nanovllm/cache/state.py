"""The data that layers keep between steps: keys and values, or a state of fixed-size tensors per sequence.

A layer with a method `cache_spec()` gets its part of the engine's memory as `layer.cache`. Layers with equal specs form
a group. The ModelRunner allocates the memory of a group together. A spec is an `AttentionSpec` (cache/kv_cache.py), a
`PagedHidden` (models/shared/head_models.py) or a `StateSpec`. Each spec has:

- `of_states`: whether the layer has one state per sequence instead of blocks of tokens.
- `tensors(num_layers, num_blocks, config)`: the tensors of the whole group, on the meta device. Dimension 1 is the
  layer, and dimension 2 is the block or the state.
- `make(parts, config)`: makes `layer.cache` from the layer's part of each tensor.

| what happens to a sequence | keys and values in blocks | a state (engine/state_blocks.py) |
| --- | --- | --- |
| prefix hit | it shares the blocks that are found | it shares blocks up to a snapshot, which its first chunk reads |
| fork | it shares full blocks, and copies the last one | it copies the state |
| preemption | its blocks are freed; the full ones can be found again | its state is lost; a snapshot can be found |
| drafts | wrong ones are overwritten | the next step adds the accepted ones |
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

NUM_FIXED = 2  # a row for padding and a row of zeros, between the rows of sequences and the rows of snapshots


class KeptDrafts(NamedTuple):
    """Stores the inputs of a layer for the drafts of a step. The next step adds the accepted drafts to the state.

    Drafts do not enter a state immediately, because they might be rejected.
    """

    inputs: torch.Tensor  # [rows, k, draft_size]: the layer's input for each of the last step's k drafts
    num_tokens: torch.Tensor  # [rows] int32: how many tokens of the sequence its state contains


class State:
    """The states of one layer. Each tensor in `tensors` has shape [rows, *shape].

    The state of a running sequence is in the row of its request index. For the i-th sequence of a step, a layer reads
    the initial state from row `Context.state_rows[0, i]`, which may be a snapshot or zeros. The layer writes the final
    state to row `Context.state_rows[1, i]`. Padding uses a separate row of each tensor.

    `kept_drafts` is None without `speculative_config`.
    """

    def __init__(self, *tensors: torch.Tensor, kept_drafts: Sequence[torch.Tensor] = ()):
        self.tensors = [tensor[0] for tensor in tensors]
        self.kept_drafts = KeptDrafts(*(tensor[0] for tensor in kept_drafts)) if kept_drafts else None

    def count_tokens(self, read: Any, written: Any, number: int) -> None:
        """Record that the states in rows `written` contain `number` more tokens than the states in rows `read`."""
        if self.kept_drafts is not None:
            self.kept_drafts.num_tokens[written] = self.kept_drafts.num_tokens[read] + number


class StateSpec(NamedTuple):
    """The spec of a layer that keeps a state: the shape and dtype of each tensor."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    draft_size: int = 0  # numbers stored per draft, in the first dtype; 0: the layer does not support drafts
    of_states = True

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        rows, pairs = config.num_states + NUM_FIXED, [*zip(self.shapes, self.dtypes, strict=True)]
        if (speculative := config.speculative_config) is not None:
            pairs += [((speculative.num_speculative_tokens, self.draft_size), self.dtypes[0]), ((), torch.int32)]
        return tuple(torch.empty((1, num_layers, rows, *shape), dtype=dtype, device="meta") for shape, dtype in pairs)

    def make(self, parts: list[torch.Tensor], config: "Config") -> State:
        if not (config.num_states or config.model_config.keeps_states):
            name = config.model_config.model_type
            raise ValueError(f"model_type={name!r}: a layer keeps a state, so `read_config` must set keeps_states=True")
        n = len(self.shapes)
        return State(*parts[:n], kept_drafts=parts[n:])


def fit_states(runner: "ModelRunner") -> None:
    """Set `Config.num_states`, and lower `Config.max_num_seqs` if needed. The runner's model must be loaded before
    `fit_states` is called.

    Each of `max_num_seqs` sequences needs a state and, with the prefix cache, a second state for a snapshot. By
    default, states take at most half of the cache's memory. If `num_kvcache_blocks` is set, states take as much memory
    as they need. If not all states fit, `max_num_seqs` is lowered. With a prefix cache, at most three quarters of the
    states that fit are for sequences, and the others are for snapshots.
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

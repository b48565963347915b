"""Functions that copy cache blocks and states on the device, for forks of sequences and snapshots of states."""

from typing import Any

import numpy as np
import torch


def block_parts(token_ids: torch.Tensor, caches: dict[Any, list[torch.Tensor]], block_id: int) -> list[torch.Tensor]:
    """Return views of everything that the cache stores for a block or a state. `copy_blocks` explains the arguments.

    The views of a block are the block's token ids and, for each group of layers, one tensor [*, layers, *] or several.
    A state has no token ids.
    """
    of_states, num_blocks = block_id >= len(token_ids), len(token_ids)
    tensors = [tensor for spec, found in caches.items() if spec.of_states == of_states for tensor in found]
    parts = [tensor[:, :, block_id - of_states * num_blocks] for tensor in tensors]
    return parts if of_states else [token_ids[block_id], *parts]


@torch.inference_mode()
def copy_blocks(copies: np.ndarray, token_ids: torch.Tensor, caches: dict[Any, list[torch.Tensor]]) -> None:
    """Copy cache blocks, the token ids of these blocks, and states.

    copies: an int32 array [2, C] of sources and targets. Ids at or above the number of blocks denote states.
    token_ids: [blocks, block_size] int32.
    caches: maps the spec of each group of layers to the group's tensors.
    """
    num_blocks = len(token_ids)
    for of_states in (False, True):
        chosen = copies[:, (copies[0] >= num_blocks) == of_states] - of_states * num_blocks
        if not chosen.size:
            continue
        sources, targets = torch.from_numpy(chosen).to(token_ids.device, non_blocking=True).long()
        tensors = (x for spec, found in caches.items() if spec.of_states == of_states for x in found)
        layers = [layer for tensor in tensors for layer in tensor.flatten(0, 1)]
        # layer by layer, because `index_select` allocates memory
        for cache in layers if of_states else (token_ids, *layers):
            cache.index_copy_(0, targets, cache.index_select(0, sources))

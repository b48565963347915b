"""Copies of what layers cache, which sequences that fork ask for, and snapshots of states."""

from typing import Any

import numpy as np
import torch


@torch.inference_mode()
def copy_blocks(copies: np.ndarray, token_ids: torch.Tensor, caches: dict[Any, list[torch.Tensor]]) -> None:
    """Copy cache blocks and their token ids, and states.

    copies [2, C] int32: the sources and the targets; states have ids after those of blocks. token_ids [blocks,
    block_size]. caches: the tensors of each group of layers, by its spec.
    """
    num_blocks = len(token_ids)
    for of_states in (False, True):
        chosen = copies[:, (copies[0] >= num_blocks) == of_states] - of_states * num_blocks
        if not chosen.size:
            continue
        sources, targets = torch.from_numpy(chosen).to(token_ids.device, non_blocking=True).long()
        tensors = (x for spec, found in caches.items() if spec.of_states == of_states for x in found)
        layers = [layer for tensor in tensors for layer in tensor.flatten(0, 1)]
        for cache in layers if of_states else (token_ids, *layers):  # a gather needs memory
            cache.index_copy_(0, targets, cache.index_select(0, sources))

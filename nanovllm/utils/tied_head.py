"""Handles checkpoints that store an output head, although config.json ties the head to the embedding."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from nanovllm.utils.loader import HEAD, StoredTensor, open_safetensors, parameter

logger = logging.getLogger("nanovllm")

NUM_ROWS = 4096  # compared at a time


def untie_other_head(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
    """Add a separate output head to `model` if the checkpoint's head differs from its embedding.

    `tensors` maps names in the model to the checkpoint's tensors. As in transformers 5, the stored head overrides
    config.json. Transformers 4 ignores the stored head.
    """
    tied, embedding = model.lm_head.weight, head_name(model)
    if embedding not in tensors or _are_equal(tensors[HEAD], tensors[embedding], tied.dtype):
        return
    if model.lm_head.tp.rank == 0:
        problem = "differs from %s, so it is used, although config.json has tie_word_embeddings=true"
        logger.warning(f"%s: %s {problem}", tensors[HEAD].file, HEAD, embedding)
    with torch.device(tied.device):
        model.lm_head.weight = parameter(tuple(tied.shape), tied.weight_loader, tied.dtype)
    model.config = replace(model.config, tie_word_embeddings=False)


def head_name(model: nn.Module) -> str:
    """Return the name of the output head's parameter. If the head is tied, return the embedding's name."""
    return next(name for name, weight in model.named_parameters() if weight is model.lm_head.weight)


def _are_equal(tensor: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors have equal shapes and bits. If their dtypes differ, both are converted to `dtype`."""
    with open_safetensors(tensor.file) as file, open_safetensors(other.file) as other_file:
        slices = file.get_slice(tensor.name), other_file.get_slice(other.name)
        shape, other_shape = (x.get_shape() for x in slices)
        has_same_dtype = slices[0].get_dtype() == slices[1].get_dtype()
        if shape != other_shape or len(shape) != 2:
            return False
        for i in range(0, shape[0], NUM_ROWS):
            rows = [x[i : i + NUM_ROWS] for x in slices]
            rows = rows if has_same_dtype else [x.to(dtype) for x in rows]
            if not np.array_equal(*(x.view(torch.uint8).numpy() for x in rows)):  # takes a quarter of PyTorch's time
                return False
        return True

"""Handles checkpoints that store an output head, although config.json ties it to the embedding."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nanovllm.utils.loader import HEAD, open_safetensors, parameter

logger = logging.getLogger("nanovllm")

NUM_ROWS = 4096  # compared at a time


def untie_other_head(model: nn.Module, files: dict[str, Path], stored_names: dict[str, str]) -> None:
    """Add a separate output head to `model` if the checkpoint's head differs from its embedding.

    `files` maps a tensor to its file, and `stored_names` maps a tensor to its name in that file. As in transformers 5,
    the stored head overrides config.json. Transformers 4 ignores the stored head.
    """
    tied, embedding = model.lm_head.weight, head_name(model)
    if embedding not in files or _are_equal(files, stored_names, (HEAD, embedding), tied.dtype):
        return
    if model.lm_head.tp.rank == 0:
        problem = "differs from %s, so it is used, although config.json has tie_word_embeddings=true"
        logger.warning(f"%s: %s {problem}", files[HEAD], HEAD, embedding)
    with torch.device(tied.device):
        model.lm_head.weight = parameter(tuple(tied.shape), tied.weight_loader, tied.dtype)
    model.config = replace(model.config, tie_word_embeddings=False)


def head_name(model: nn.Module) -> str:
    """Return the name of the output head's parameter. If the head is tied, this is the embedding's name."""
    return next(name for name, weight in model.named_parameters() if weight is model.lm_head.weight)


def _are_equal(
    files: dict[str, Path], stored_names: dict[str, str], names: tuple[str, str], dtype: torch.dtype
) -> bool:
    """Return whether two tensors have equal shapes and bits. If their dtypes differ, both are converted to `dtype`."""
    name, other = names
    with open_safetensors(files[name]) as file, open_safetensors(files[other]) as other_file:
        slices = file.get_slice(stored_names[name]), other_file.get_slice(stored_names[other])
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

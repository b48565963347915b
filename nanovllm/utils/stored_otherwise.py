"""Loads checkpoints in other layouts: one tensor for all parts of a merged layer, or a text model in a larger model."""

from collections.abc import Callable
from typing import Any

import torch

WHOLE = "whole"  # the shard id of such a tensor in `packed_modules_mapping`


def load_whole(load: Callable, layer: Any, weight) -> torch.Tensor | None:
    """Load a tensor that contains the rows of all parts, one part after another: a weight, a bias, or block scales.

    load: the parameter's `weight_loader`, which takes a part and its shard id.
    Returns the least and greatest number of each part, or None if `load` returns None.
    """
    ids, sizes, bounds = layer.shard_ids(), layer.output_sizes, []
    shape = [1] if callable(weight) else [*(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())]
    num_rows, first = shape[0], 0
    if not callable(weight) and any(size * num_rows % sum(sizes) for size in sizes):
        raise ValueError(f"the checkpoint has shape {shape}, whose rows can't be divided as {sizes}")
    for shard_id, size in zip(ids, sizes, strict=True):
        end = first + size * num_rows // sum(sizes)
        filled = load(weight if callable(weight) else weight[first:end], *shard_id)
        bounds += [] if filled is None else filled.aminmax()
        first = end
    return torch.stack(bounds) if bounds else None


# the text model's tensor names: prefix in a multimodal checkpoint -> prefix in a checkpoint with only text
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
IMAGE_PREFIXES = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def text_name(name: str) -> str:
    """Return a tensor's name in a checkpoint with only the text model."""
    for prefix, own in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name

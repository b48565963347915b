"""Weights from safetensors files into a model's parameters, by name, and nothing left over or left out."""
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from nanovllm.utils.distributed import TensorParallel


def parameter(shape: tuple[int, ...], load: Callable) -> nn.Parameter:
    """A parameter with a `weight_loader(weight, ...)`, which is `load(parameter, weight, ...)`."""
    made = nn.Parameter(torch.empty(shape), requires_grad=False)
    made.weight_loader = partial(load, made)
    return made


def copy_shard(target: torch.Tensor, weight, shape: tuple[int, ...], dim: int = 0, tp: TensorParallel = TensorParallel()):
    """Copy this rank's equal part along `dim`, which is all that is read of a safetensors slice; the whole must have `shape`."""
    found = tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())
    if found != tuple(shape):
        raise ValueError(f"the checkpoint has shape {list(found)}, the model needs {list(shape)}")
    size = tp.share("checkpoint tensor", shape[dim])
    part = slice(tp.rank * size, (tp.rank + 1) * size)
    target.copy_(weight[part] if dim == 0 else weight[:, part])


def iterate_weights(folder: Path, device: torch.device) -> Iterator[tuple[str, object]]:
    """(name, lazy slice) of every tensor in the folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: holds no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():
                yield name, tensors.get_slice(name)


@torch.no_grad()
def load_model(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Fill `model` from `folder`.

    `model.packed_modules_mapping` sends a checkpoint's module to the merged one that holds it, with its place there.
    Every parameter brings a `weight_loader(weight)`, or `weight_loader(weight, place)` where several share it.
    Raises ValueError that names the tensor where one is missing, surplus or of another shape.
    """
    parameters = dict(model.named_parameters())
    expected = set(_checkpoint_names(model))
    surplus, seen = [], set()
    for name, weight in iterate_weights(folder, device):
        if name in seen or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue  # a tied checkpoint may carry the embedding twice
        if name not in expected:
            surplus.append(name)
            continue
        seen.add(name)
        module = name.split(".")[-2]
        merged, *place = model.packed_modules_mapping.get(module, (module,))
        try:
            parameters[name.replace(f".{module}.", f".{merged}.")].weight_loader(weight, *place)
        except ValueError as error:
            raise ValueError(f"{folder}: {name}: {error}") from error
    if missing := sorted(expected - seen):
        raise ValueError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if surplus:
        raise ValueError(f"{folder}: {len(surplus)} tensors belong to no parameter: {_some(surplus)}")


def _checkpoint_names(model: nn.Module) -> Iterator[str]:
    parts: dict[str, list[str]] = {}
    for part, (merged, _) in model.packed_modules_mapping.items():
        parts.setdefault(merged, []).append(part)
    for name, _ in model.named_parameters():
        module = name.split(".")[-2]
        for part in parts.get(module, [module]):
            yield name.replace(f".{module}.", f".{part}.")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")

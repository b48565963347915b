"""Weights from safetensors files into a model's parameters, by name, and nothing left over or left out."""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.utils.hub import read_json, refuse_lfs_pointer
from nanovllm.utils.tensor_parallel import TensorParallel

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
DUMMY_BOUND = 0.035  # of a uniform distribution with standard deviation 0.02, the usual initializer_range


def parameter(shape: tuple[int, ...], load: Callable, dtype: torch.dtype) -> nn.Parameter:
    """A parameter whose `weight_loader(weight, ...)` is `load(parameter, weight, ...)`, and returns what it filled."""
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    made.weight_loader = partial(load, made)
    return made


def copy_shard(
    target: torch.Tensor, weight, shape: tuple[int, ...], dim: int = 0, tp: TensorParallel = TensorParallel()
) -> torch.Tensor:
    """Copy this rank's equal part along `dim` of a weight whose whole must have `shape`; returns the target.

    `weight` is a tensor, a safetensors slice, of which no more than the part is read, or a function of the shape.
    """
    weight = weight(shape) if callable(weight) else weight
    found = tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())
    if found != tuple(shape):
        raise ValueError(f"the checkpoint has shape {list(found)}, the model needs {list(shape)}")
    size = tp.shard_size("checkpoint tensor", shape[dim])
    part = slice(tp.rank * size, (tp.rank + 1) * size)
    return target.copy_(weight[part] if dim == 0 else weight[:, part])


@torch.no_grad()
def load_model(model: nn.Module, folder: Path, device: torch.device, load_format: str = "auto") -> None:
    """Fill `model` from the safetensors files in `folder`, or without them if `load_format` is "dummy".

    `model.packed_modules_mapping` sends a checkpoint's module to the merged one that holds it, with its place there.
    Every parameter brings a `weight_loader(weight)`, or `weight_loader(weight, place)` where several share it.
    Raises ValueError that names the tensor where one is missing, surplus, in two files, of another shape, not floating
    point, NaN or infinite; ValueError or FileNotFoundError that names the file where one is broken or missing.
    """
    if load_format == "dummy":
        return _load_dummy(model)
    files, loaders = find_tensors(folder), _weight_loaders(model)
    if model.config.tie_word_embeddings:
        files.pop("lm_head.weight", None)  # a tied checkpoint may carry the embedding twice
    if missing := sorted(loaders.keys() - files.keys()):
        raise ValueError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if surplus := sorted(files.keys() - loaders.keys()):
        raise ValueError(f"{folder}: {len(surplus)} tensors belong to no parameter: {_some(surplus)}")
    bounds = {}
    for file in sorted(set(files.values())):
        with open_safetensors(file, device) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                load, place = loaders[name]
                try:
                    filled = load(tensors.get_slice(name), *place)
                except ValueError as error:
                    raise ValueError(f"{folder}: {name}: {error}") from error
                bounds[name] = torch.stack(filled.aminmax())  # NaN if one element is
    are_finite = torch.stack([*bounds.values()]).isfinite().all(1).tolist()  # the only wait for the device
    if broken := sorted(name for name, is_finite in zip(bounds, are_finite) if not is_finite):
        raise ValueError(f"{folder}: {len(broken)} tensors are NaN or infinite in {filled.dtype}: {_some(broken)}")


def find_tensors(folder: Path) -> dict[str, Path]:
    """The file of every tensor of the checkpoint in `folder`, whose headers are checked.

    As in transformers: `model.safetensors`, else the files that the index names, each for its tensors. Where there is
    neither, all *.safetensors.
    """
    index = folder / "model.safetensors.index.json"
    names_of: dict[Path, list[str] | None]  # None: all that it holds
    if (single := folder / "model.safetensors").is_file():
        names_of = {single: None}
    elif index.is_file():
        names_of = _read_index(index)
    else:
        names_of = dict.fromkeys(sorted(folder.glob("*.safetensors")))
    if not names_of:
        raise FileNotFoundError(f"{folder}: holds no *.safetensors")
    found: dict[str, Path] = {}
    for file, names in names_of.items():
        with open_safetensors(file) as tensors:
            held = dict.fromkeys(tensors.keys())
            for name in held if names is None else names:
                if name not in held:
                    raise ValueError(f"{file}: lacks {name}, which {index.name} says is there")
                if name in found:
                    raise ValueError(f"{folder}: {name} is in both {found[name].name} and {file.name}")
                if (dtype := tensors.get_slice(name).get_dtype()) not in FLOAT_DTYPES:
                    raise ValueError(f"{file}: {name} has dtype {dtype}: must be one of {', '.join(FLOAT_DTYPES)}")
                found[name] = file
    return found


def _read_index(index: Path) -> dict[Path, list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    names_of: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        names_of.setdefault(index.parent / file, []).append(name)
    for file in names_of:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: is missing, and {index.name} names it")
    return names_of


def open_safetensors(file: Path, device: torch.device | str = "cpu"):
    """A context manager for the open file; ValueError that names it where it is no complete safetensors file."""
    refuse_lfs_pointer(file)
    try:
        return safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{file}: is not a complete safetensors file ({error})") from error


def _load_dummy(model: nn.Module) -> None:
    """Small random numbers that depend on the tensor's name alone, so that all ranks hold parts of the same model."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=like.dtype, device=like.device)
        return values.uniform_(-DUMMY_BOUND, DUMMY_BOUND, generator=generator)

    like = next(model.parameters())
    for name, (load, place) in _weight_loaders(model).items():
        load(partial(draw, name), *place)


def _weight_loaders(model: nn.Module) -> dict[str, tuple[Callable, list[int]]]:
    """The weight loader of every tensor by its name in a checkpoint, and its place where several share a parameter."""
    parts: dict[str, list[tuple]] = {}
    for part, (merged, place) in model.packed_modules_mapping.items():
        parts.setdefault(merged, []).append((part, place))
    loaders = {}
    for name, made in model.named_parameters():
        module = name.split(".")[-2]
        for part, *place in parts.get(module, [(module,)]):
            loaders[name.replace(f".{module}.", f".{part}.")] = made.weight_loader, place
    return loaders


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")

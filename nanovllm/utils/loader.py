"""Weights from safetensors files into a model's parameters, by name; none may be missing or left over."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
BAR_DELAY = 1  # seconds until the progress bar is shown


def parameter(shape: tuple[int, ...], load: Callable, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter with a `weight_loader(weight, ...)`: `load(parameter, weight, ...)`, which returns what it filled.

    Without a dtype it has a shape and no memory: a weight format will replace it.
    """
    empty = torch.empty(shape, dtype=dtype, device=None if dtype else "meta")
    empty = nn.Parameter(empty, requires_grad=False)
    empty.weight_loader = partial(load, empty)
    return empty


def check_shape(weight, shape: tuple[int, ...]):
    """A tensor or a safetensors slice, which must have `shape`; of a function of the shape, what it returns."""
    weight = weight(shape) if callable(weight) else weight
    found = tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())
    if found != tuple(shape):
        raise ValueError(f"the checkpoint has shape {list(found)}, the model needs {list(shape)}")
    return weight


class Shard(NamedTuple):
    """The part of a checkpoint's weight that a rank has, and where."""

    shape: tuple[int, ...]  # of the whole weight
    rows: slice = slice(None)  # of the whole weight
    columns: slice = slice(None)
    first_row: int = 0  # in the rank's own weight

    def copy(self, target: torch.Tensor, weight) -> torch.Tensor:
        """Copy this part of a weight or bias, which `check_shape` takes, to `target`; returns what was filled.

        Of a safetensors slice only this part is read.
        """
        weight = check_shape(weight, self.shape[: target.dim()])
        weight = weight[self.rows, self.columns] if target.dim() == 2 else weight[self.rows]
        return target.narrow(0, self.first_row, len(weight)).copy_(weight)


@torch.no_grad()
def load_model(
    model: nn.Module, folder: Path, device: torch.device, load_format: str = "auto", show_progress: bool = False
) -> None:
    """Fill `model` from the safetensors files in `folder`, or with random numbers if `load_format` is "dummy".

    `model.packed_modules_mapping` maps a checkpoint's module to the merged one that holds it, and its shard id there.
    Every parameter has a `weight_loader(weight)`, or `weight_loader(weight, shard_id)` if several tensors share it.
    `show_progress` shows a bar of files, if there are several and they are not read at once.
    Raises ValueError that names the tensor if one is missing, surplus, in two files, of another shape, not floating
    point, NaN or infinite; ValueError or FileNotFoundError that names the file if one is broken or missing.
    """
    if quantization := model.config.quantization:
        quantization.prepare(model, device)
    if load_format == "dummy":
        from nanovllm.utils.dummy_weights import load_dummy

        load_dummy(model, weight_loaders(model))
        return
    files = find_tensors(folder, FLOAT_DTYPES + (quantization.dtypes if quantization else ()))
    loaders = weight_loaders(model)
    if model.config.moe:
        from nanovllm.moe.weights import split_experts

        split_experts(loaders, model, files)
    if model.config.tie_word_embeddings:
        files.pop("lm_head.weight", None)  # a tied checkpoint may carry the embedding twice
    # old checkpoints of Llama store the frequencies of the rotary embedding, which config.json defines
    unused = (".rotary_emb.inv_freq", *(quantization.unused_tensors if quantization else ()))
    files = {name: file for name, file in files.items() if not name.endswith(unused)}
    if missing := sorted(loaders.keys() - files.keys()):
        raise _refused(folder, missing, "are missing")
    if surplus := sorted(files.keys() - loaders.keys()):
        raise _refused(folder, surplus, "belong to no parameter")
    bounds = {}
    in_order = sorted(set(files.values()))
    if show_progress and len(in_order) > 1:
        from nanovllm.utils.progress import with_bar

        in_order = with_bar(in_order, desc="Loading weights", unit=" files", delay=BAR_DELAY, leave=False)
    for file in in_order:
        with open_safetensors(file, device) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                load, shard_id = loaders[name]
                try:
                    filled = load(tensors.get_slice(name), *shard_id)
                except ValueError as error:
                    raise ValueError(f"{folder}: {name}: {error}") from error
                if filled is not None:
                    bounds[name] = torch.stack(filled.aminmax())  # NaN if any element is
    are_finite = torch.stack([*bounds.values()]).isfinite().all(1).tolist()  # the only synchronization
    if broken := sorted(name for name, is_finite in zip(bounds, are_finite) if not is_finite):
        raise _refused(folder, broken, f"are NaN or infinite in {filled.dtype}")


def find_tensors(folder: Path, dtypes: tuple[str, ...] = FLOAT_DTYPES) -> dict[str, Path]:
    """The file of every tensor of the checkpoint in `folder`, whose headers are checked.

    As in transformers, a `model.safetensors` comes before all other files.
    """
    if (single := folder / "model.safetensors").is_file():
        found = {name: (single, dtype) for name, dtype in stored_dtypes(single).items()}
    else:
        from nanovllm.utils.sharded_checkpoint import find_in_files  # large models have several files

        found = find_in_files(folder, stored_dtypes)
    for name, (file, dtype) in found.items():
        if dtype not in dtypes:
            raise ValueError(f"{file}: {name} has dtype {dtype}: must be one of {', '.join(dtypes)}")
    return {name: file for name, (file, _) in found.items()}


def stored_dtypes(file: Path) -> dict[str, str]:
    """The tensors in a file, with their dtypes as safetensors names them."""
    with open_safetensors(file) as tensors:
        names = tensors.keys()
        return {name: tensors.get_slice(name).get_dtype() for name in names}


def open_safetensors(file: Path, device: torch.device | str = "cpu"):
    """A context manager for the open file; ValueError that names the file if it is no complete safetensors file."""
    try:
        return safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        from nanovllm.utils.download import broken_file  # its words are rarely needed

        raise broken_file(file, f"is not a complete safetensors file ({error})") from error


def weight_loaders(model: nn.Module) -> dict[str, tuple[Callable, list[int]]]:
    """The weight loader of every tensor by its name in a checkpoint, and its shard id if several share a parameter."""
    shards_of: dict[str, list[tuple]] = {}
    for module, (merged, shard_id) in model.packed_modules_mapping.items():
        shards_of.setdefault(merged, []).append((module, shard_id))
    loaders = {}
    for name, parameter in model.named_parameters():
        *path, merged, kind = name.split(".")  # kind: weight or bias
        for module, *shard_id in shards_of.get(merged, [(merged,)]):
            loaders[".".join((*path, module, kind))] = parameter.weight_loader, shard_id
    return loaders


def _refused(folder: Path, names: list[str], problem: str, limit: int = 5) -> ValueError:
    first_names = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return ValueError(f"{folder}: {len(names)} tensors {problem}: {first_names}")

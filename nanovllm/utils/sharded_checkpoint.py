"""Finds tensors in checkpoints with several files, with or without an index."""

from collections.abc import Callable
from pathlib import Path

from nanovllm.utils.checks import read_json


def find_in_files(folder: Path, stored_dtypes: Callable[[Path], dict[str, str]]) -> dict[str, tuple[Path, str]]:
    """Return a dict that maps each tensor's name to (file, dtype).

    `stored_dtypes(file)` returns the dtypes of a file's tensors. As in transformers, the index lists the files and
    their tensors. If there is no index, every *.safetensors file is read.
    """
    index = folder / "model.safetensors.index.json"
    names_of: dict[Path, list[str] | None]  # None: all tensors in the file
    names_of = _read_index(index) if index.is_file() else dict.fromkeys(sorted(folder.glob("*.safetensors")))
    if not names_of:
        raise FileNotFoundError(f"{folder}: holds no *.safetensors")
    tensors: dict[str, tuple[Path, str]] = {}
    for file, names in names_of.items():
        stored = stored_dtypes(file)
        for name in stored if names is None else names:
            if name not in stored:
                raise ValueError(f"{file}: lacks {name}, which {index.name} says is there")
            if name in tensors:
                raise ValueError(f"{folder}: {name} is in both {tensors[name][0].name} and {file.name}")
            tensors[name] = file, stored[name]
    return tensors


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

"""Finds what a checkpoint was made for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.utils.checks import read_json

if TYPE_CHECKING:
    from nanovllm.config import Config

TASKS = {"generate": "generates text", "embed": "computes embeddings"}
TASKS |= {"score": "scores documents", "classify": "classifies texts"}
CLASSIFIER = "ForSequenceClassification"


def find_task(folder: Path) -> str:
    """Return the task for which the checkpoint in `folder` was made: a key of TASKS."""
    raw = read_json(folder / "config.json")
    architecture = str((raw.get("architectures") or [""])[0])
    if architecture.endswith(CLASSIFIER):
        return "score" if len(labels_of(raw)) == 1 else "classify"
    if not (folder / "modules.json").is_file():
        return "embed" if architecture.endswith("Model") else "generate"
    return "score" if "LogitScore" in modules_of(folder) else "embed"


def check_task(config: "Config", *tasks: str) -> None:
    """Raise ValueError unless the engine has one of these tasks."""
    if config.task not in tasks:
        wanted = " or ".join(f"task={task!r}" for task in tasks)
        raise ValueError(f"task={config.task!r}: this engine {TASKS[config.task]}; this call needs {wanted}")


def labels_of(raw: dict) -> tuple[str, ...]:
    """Return the names of the classes. As in transformers, there are two unless config.json says otherwise."""
    names = raw.get("id2label") or [f"LABEL_{i}" for i in range(raw.get("num_labels") or 2)]
    return tuple(map(str, names.values() if isinstance(names, dict) else names))


def modules_of(folder: Path) -> dict[str, Path]:
    """Return the folder of each module in `modules.json`, by the name of its class in sentence-transformers."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_bytes())
        return {module["type"].rpartition(".")[2]: folder / module.get("path", "") for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: must be a list of objects with a 'type' ({error!r})") from error

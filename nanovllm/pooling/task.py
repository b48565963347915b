"""Finds the task for which a checkpoint was made."""

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.utils.checks import read_json

if TYPE_CHECKING:
    from nanovllm.config import Config

TASKS = {"generate": "generates text", "embed": "computes embeddings"}
TASKS |= {"score": "scores documents", "classify": "classifies texts"}


def find_task(folder: Path, pools: bool = False) -> str:
    """Return the task for which a checkpoint was made or, if `pools` is True, "embed" instead of "generate"."""
    architecture = str((read_json(folder / "config.json").get("architectures") or [""])[0])
    if architecture.endswith(("ForSequenceClassification", "Model")) or (folder / "modules.json").is_file():
        from nanovllm.pooling.pooling_config import find_pooling_task  # few checkpoints are for another task

        return find_pooling_task(folder)
    return "embed" if pools else "generate"


def check_task(config: "Config", *tasks: str) -> None:
    """Raise ValueError if the engine's task is not one of `tasks`."""
    if config.task not in tasks:
        wanted = " or ".join(f"task={task!r}" for task in tasks)
        raise ValueError(f"task={config.task!r}: this engine {TASKS[config.task]}; this call needs {wanted}")

"""Long error messages that can occur at startup."""

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.config import Config


def cache_too_small(config: "Config", block_bytes: int, state_bytes: int, available: int, limit: str) -> ValueError:
    """Return the error if the longest sequence needs more cache than `available` bytes. `limit` states the cause."""
    needed = config.max_blocks_per_seq * block_bytes + state_bytes
    return ValueError(
        f"max_model_len={config.max_model_len}: one sequence needs {needed / 2**30:.2f} GiB of cache, and {limit} "
        f"{available / 2**30:.2f} GiB; lower max_model_len, or set num_kvcache_blocks"
    )


def other_tensors(folder: Path, stored: Set[str], wanted: Set[str]) -> ValueError:
    """Return the error for a checkpoint whose tensors are not those that the model needs."""
    heads = {name for name in stored - wanted if name.startswith("lm_head.") and not name.endswith(".bias")}
    if heads and wanted - stored <= {"lm_head.weight"}:
        return bad_tensors(folder, heads, "belong to a quantized output head, which is not supported")
    if missing := wanted - stored:
        return bad_tensors(folder, missing, "are missing")
    return bad_tensors(folder, stored - wanted, "belong to no parameter")


def bad_tensors(folder: Path, names: Iterable[str], problem: str, limit: int = 5) -> ValueError:
    names = sorted(names)
    first_names = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return ValueError(f"{folder}: {len(names)} tensors {problem}: {first_names}")


def no_config(model: str, folder: Path) -> FileNotFoundError:
    """Make the error for a model's folder without config.json."""
    if (folder / "adapter_config.json").is_file():
        advice = "load its base model with enable_lora=True, and pass the adapter as lora_request"
        problem = f"the folder holds a LoRA adapter; {advice} (see nanovllm/docs/lora.md)"
        return FileNotFoundError(f"model={model!r}: {problem}")
    return FileNotFoundError(f"model={model!r}: the folder holds no config.json")

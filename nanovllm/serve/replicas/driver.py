"""Checks and tokenizes requests like an engine, but does not load the model."""

from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.utils.loader import load_tokenizer

# override device and weight settings, because the driver has no device or weights; replicas check the caller's values
DRIVER_OVERRIDES = {"device": "cpu", "tensor_parallel_size": 1, "load_format": "dummy", "attention_backend": "auto"}
ANSWERS_PER_SEQ = 2  # a replica gets at most this many times `max_num_seqs` answers: a running and a waiting batch


def make_processor(model: str, settings: dict[str, Any], first_request_id: int = 0) -> InputProcessor:
    """Create the InputProcessor of `LLM(model, **settings)`. No GPU and no weights are needed.

    Raises the same errors as `LLM`.
    """
    config = Config.create(model, settings | DRIVER_OVERRIDES)
    return InputProcessor(config, load_tokenizer(str(config.tokenizer)), first_request_id)


def absolute_path(path: str) -> str:
    """Return a folder's absolute path, because actors may have another working folder. Return a hub id unchanged."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().is_dir() else path

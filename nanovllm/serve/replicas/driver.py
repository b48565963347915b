"""The part of an engine that checks and tokenizes requests, without a model."""

from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.utils.loader import load_tokenizer

# settings of devices and weights, which each replica checks itself, have values here that need neither
DRIVER_OVERRIDES = {"device": "cpu", "tensor_parallel_size": 1, "load_format": "dummy", "attention_backend": "auto"}
ANSWERS_PER_SEQ = 2  # a replica gets at most this many times `max_num_seqs`: one batch runs while the next one waits


def make_processor(model: str, settings: dict[str, Any], first_request_id: int = 0) -> InputProcessor:
    """An InputProcessor like that of `LLM(model, **settings)`, with its errors. Needs no GPU and reads no weights."""
    config = Config.create(model, settings | DRIVER_OVERRIDES)
    return InputProcessor(config, load_tokenizer(str(config.tokenizer)), first_request_id)


def absolute_path(path: str) -> str:
    """A folder as an absolute path, as actors may have another working directory; a hub id as it is."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().is_dir() else path

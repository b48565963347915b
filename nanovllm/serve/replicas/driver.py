"""The part of an engine that checks and tokenizes requests, without a model."""

from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.utils.loader import load_tokenizer

# replaces settings about devices and weights, which the driver does not have; each replica checks the given values
DRIVER_OVERRIDES = {"device": "cpu", "tensor_parallel_size": 1, "load_format": "dummy", "attention_backend": "auto"}
ANSWERS_PER_SEQ = 2  # a replica gets at most this many times `max_num_seqs`: a batch that runs, and one that waits


def make_processor(model: str, settings: dict[str, Any], first_request_id: int = 0) -> InputProcessor:
    """Make an InputProcessor as for `LLM(model, **settings)`, with the same errors, but without a GPU or weights."""
    config = Config.create(model, settings | DRIVER_OVERRIDES)
    return InputProcessor(config, load_tokenizer(str(config.tokenizer)), first_request_id)


def absolute_path(path: str) -> str:
    """Return a folder as an absolute path, because actors may run in another folder. Return a hub id unchanged."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().is_dir() else path

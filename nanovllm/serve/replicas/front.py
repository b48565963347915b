"""The part of an engine that checks and tokenizes, without the part that computes."""

from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.scheduling_policy import make_policy
from nanovllm.utils.tokenizer import load_tokenizer

# what concerns a replica's devices and weights, which it checks itself
OF_REPLICAS = {"device": "cpu", "tensor_parallel_size": 1, "load_format": "dummy", "attention_backend": "auto"}
ANSWERS_PER_SEQ = 2  # a replica has at most so many times `max_num_seqs` answers: one batch runs while the next waits


def make_processor(model: str, settings: dict[str, Any]) -> InputProcessor:
    """An InputProcessor like that of `LLM(model, **settings)`, with its errors. Needs no GPU and reads no weights."""
    config = Config.create(model, settings | OF_REPLICAS)
    return InputProcessor(config, load_tokenizer(str(config.tokenizer)), make_policy(config.scheduling_policy))


def for_other_hosts(path: str) -> str:
    """A folder's path, from whichever working directory; anything else as it is."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().is_dir() else path

"""Mistral: a Llama without biases, whose attention may have a sliding window."""

from pathlib import Path
from typing import ClassVar

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.utils.checks import check_int
from nanovllm.utils.nested_names import IMAGE_PREFIXES


class MistralForCausalLM(LlamaForCausalLM):
    may_be_nested, unused_prefixes = True, IMAGE_PREFIXES
    defaults: ClassVar = {"sliding_window": 4096}

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        window = raw.get("sliding_window")  # null means no window
        return {"sliding_window": None if window is None else check_int(f"{file}: sliding_window", window, low=1)}

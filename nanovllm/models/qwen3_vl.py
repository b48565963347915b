"""Qwen3-VL, dense: Qwen3 with a vision tower."""

from pathlib import Path
from typing import ClassVar

from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.shared.nested import TOWER_PREFIX, nest
from nanovllm.vision.vision_config import read_vision


def read_qwen3_vision(raw: dict, file: Path) -> dict:
    defaults = dict(image_token_id=151655, mrope_section=(24, 20, 20), deepstack=(8, 16, 24))
    return {"vision": read_vision(raw, file, **defaults)}


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    unused_prefixes = (TOWER_PREFIX,)
    defaults: ClassVar = {"head_dim": 128, "rope_theta": 5e5}  # transformers' defaults

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        nest(self, config)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return Qwen3ForCausalLM.read_config(raw, file) | read_qwen3_vision(raw, file)

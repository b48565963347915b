"""Qwen2 and Qwen2.5: queries, keys and values have a bias, and no q and k norms."""

from pathlib import Path

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return {"qkv_bias": True}

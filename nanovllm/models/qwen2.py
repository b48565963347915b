"""Qwen2 and Qwen2.5: queries, keys and values have a bias, and no q and k norms."""

from pathlib import Path

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return {"qkv_bias": True}

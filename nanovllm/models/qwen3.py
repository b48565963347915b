"""Qwen3, dense: queries and keys have norms."""

from pathlib import Path

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        bias = raw.get("attention_bias", False)
        return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}

"""Qwen2 and Qwen2.5: a Llama whose queries, keys and values have a bias."""

from pathlib import Path

from nanovllm.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return {"qkv_bias": True}

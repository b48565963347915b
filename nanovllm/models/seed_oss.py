"""Seed-OSS: a Llama with a bias for queries, keys and values."""

from pathlib import Path
from typing import ClassVar

from nanovllm.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    defaults: ClassVar = {"head_dim": 128, "attention_bias": True}

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        config = LlamaForCausalLM.read_config(raw, file)
        return config | {"o_bias": raw.get("attention_out_bias", False)}

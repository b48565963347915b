"""Llama 2 and 3, and models that are stored as such: attention without q and k norms."""

from pathlib import Path

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.checks import check_choice


class LlamaForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        # more than 1 splits matrix products, to round as the training did
        check_choice(f"{file}: pretraining_tp", raw.get("pretraining_tp") or 1, (1,))
        bias = raw.get("attention_bias", False)
        return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}

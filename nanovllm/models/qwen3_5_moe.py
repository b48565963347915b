"""Qwen3.5 and 3.6 with mixtures of experts and a shared expert in all layers."""

from typing import ClassVar

from nanovllm.models.qwen3_5 import Qwen3_5ForCausalLM


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    defaults: ClassVar = Qwen3_5ForCausalLM.defaults | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "intermediate_size": 512,  # no layer uses this size
    }

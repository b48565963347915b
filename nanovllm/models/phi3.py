"""Phi-3, Phi-4 and Phi-4-mini: a Llama.

Checkpoints store q, k and v as one merged weight, and gate and up as another.
"""

from typing import ClassVar

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.utils.merged_tensors import WHOLE


class Phi3ForCausalLM(LlamaForCausalLM):
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ("qkv_proj", WHOLE),
        "gate_up_proj": ("gate_up_proj", WHOLE),
    }
    read_config = staticmethod(MistralForCausalLM.read_config)

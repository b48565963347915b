"""gpt-oss: a Llama with biases, attention sinks and mixtures of experts. Every second layer has a sliding window.

The experts have biases and a variant of SwiGLU (`Activation`). Published weights of experts are in MXFP4.
"""

from pathlib import Path
from typing import ClassVar

from torch import nn

from nanovllm.kernels.activations import Activation
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.llama import LlamaAttention
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm.models.shared.windows import fields_of_sizes
from nanovllm.moe.experts import MoE
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.utils.checks import check_int, check_real
from nanovllm.utils.loader import Shard, parameter
from nanovllm.utils.merged_tensors import WHOLE


class GptOssAttention(LlamaAttention):
    """Each head has a sink (arXiv:2309.17453): the softmax includes one more score, which belongs to no value."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, window: int | None):
        super().__init__(config, rotary_emb)
        num_heads = config.num_attention_heads
        shard = Shard((num_heads,), self.o_proj.tp.local_slice(num_heads))
        self.sinks = parameter((self.num_heads,), shard.copy)
        self.attn.sinks, self.attn.window = self.sinks.data, window


class GptOssForCausalLM(Qwen3ForCausalLM):
    layer_types = ("full_attention", "sliding_attention")
    packed_modules_mapping: ClassVar = Qwen3ForCausalLM.packed_modules_mapping | {"router": ("gate", WHOLE)}
    defaults: ClassVar = {
        "torch_dtype": "bfloat16",  # published checkpoints do not name the dtype
        "head_dim": 64,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        attention = GptOssAttention(config, rotary_emb, config.details[layer_index])
        return Qwen3DecoderLayer(config, attention, MoE(config.hidden_size, config.moe))

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        """Return the fields of ModelConfig that gpt-oss sets.

        `details` contains each layer's window, or None for full attention.
        """
        num_layers = raw["num_hidden_layers"]
        window = check_int(f"{file}: sliding_window", raw["sliding_window"], low=1)
        kinds = raw.get("layer_types") or ("sliding_attention", "full_attention") * num_layers
        num_experts = check_int(f"{file}: num_local_experts", raw.get("num_local_experts"), low=1)
        top_k = check_int(f"{file}: num_experts_per_tok", raw["num_experts_per_tok"], low=1, high=num_experts)
        limit, alpha = (
            check_real(f"{file}: {name}", raw[name], low=1e-6, high=1e30) for name in ("swiglu_limit", "swiglu_alpha")
        )
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])
        return {
            "qkv_bias": raw["attention_bias"],
            "o_bias": raw["attention_bias"],
            "details": windows,
            **fields_of_sizes(windows),
            "moe": MoEConfig(
                *(frozenset(range(num_layers)), num_experts, top_k, raw["intermediate_size"]),
                renormalize=True,  # a softmax over the chosen experts
                **dict(has_bias=True, activation=Activation(alpha, shift=1.0, limit=limit), alternates=True),
            ),
        }

"""Hybrid decoders. Most layers of a hybrid decoder have a state (gated delta rule); the others have gated attention.

Each family of hybrid decoders is a subclass of HybridForCausalLM. Families differ in feed-forward layers, and in how
checkpoints store projections.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.delta_net.gated_delta_net import DeltaHeads, GatedDeltaNet
from nanovllm.delta_net.hybrid_config import LAYER_TYPES, read_hybrid
from nanovllm.delta_net.scattered_linear import GatedQKVParallelLinear
from nanovllm.layers.layernorm import ZeroCenteredRMSNorm, add_and_norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sigmoid_gate import SigmoidGate, sigmoid_gate
from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.shared.nested import TOWER_PREFIX, nest
from nanovllm.moe.experts import MoE
from nanovllm.utils.construction import get_construction
from nanovllm.utils.tensor_parallel import TensorParallel
from nanovllm.vision.vision_config import read_vision


class GatedAttention(Qwen3Attention):
    """Multiplies the output of attention by the sigmoid of a gate. The qkv projection also computes the gate."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        sizes = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = GatedQKVParallelLinear(*sizes, bias=config.qkv_bias)
        self.q_norm = ZeroCenteredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCenteredRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        gate, q, k, v = gate_qkv.split([self.num_heads, self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(sigmoid_gate(self.attn(q, k, v), gate.flatten(1)))


class SharedExpertMoE(MoE):
    """A mixture of experts, and a shared expert that every token uses.

    If the shared expert has the shape and the weight format of the other experts, it becomes the last expert in the
    stacked weights. If the shared expert is stacked, the router's weight also contains the shared expert's gate. The
    parameters of a stacked shared expert are views of the stacked weights, and loading fills the views. With expert
    parallelism or adapters, the shared expert is not stacked.
    """

    def __init__(self, config: ModelConfig, layer_index: int):
        size, moe, quantization = config.hybrid.shared_size, config.moe, config.quantization
        is_alike = size == moe.intermediate_size and moe.stacks_shared and not moe.expert_parallel
        if is_alike and quantization is not None:
            paths = [f"model.layers.{layer_index}.mlp.{name}" for name in ("experts.0", "shared_expert")]
            parts = [f"{path}.{name}_proj" for path in paths for name in ("gate", "up", "down")]
            is_alike = len({quantization.scheme_of(part) for part in parts}) == 1
        super().__init__(config.hidden_size, replace(moe, num_shared=int(is_alike)))
        self.shared_expert = Qwen3MLP(replace(config, intermediate_size=size))
        self.shared_expert_gate = SigmoidGate(config.hidden_size)
        if is_alike and quantization is None:
            self.stack_shared_expert()

    def stack_shared_expert(self) -> None:
        """Replace the shared expert's parameters with views of the stacked weights.

        The weight formats must be set before this call.
        """
        stacks = self.experts.format.stacks(self.experts)
        for layer, stack in zip((self.shared_expert.gate_up_proj, self.shared_expert.down_proj), stacks):
            if hasattr(layer, "format"):
                layer.format.move_to_end(stack)
            else:  # not quantized
                layer.weight.data = stack.data[-1]
        self.shared_expert_gate.weight.data = self.gate.weight.data[-1:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = super().forward(x)
        return mixed if self.num_shared else mixed + self.shared_expert_gate(x, self.shared_expert(x))


class HybridLayer(nn.Module):
    """Like Qwen3DecoderLayer, but with either a GatedAttention or a GatedDeltaNet.

    Attributes have the same names as in checkpoints.
    """

    def __init__(self, config: ModelConfig, mixer: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps)
        if isinstance(mixer, GatedDeltaNet):
            self.linear_attn, self.self_attn = mixer, None
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        x = self.linear_attn(x) if self.self_attn is None else self.self_attn(positions, x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class HybridForCausalLM(Qwen3ForCausalLM):
    norm_class = ZeroCenteredRMSNorm
    layer_types = LAYER_TYPES
    unused_prefixes = (TOWER_PREFIX, "mtp.")
    # transformers' defaults
    defaults: ClassVar = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        if config.hybrid.is_nested:
            nest(self, config)

    @staticmethod
    def delta_net_weights(heads: DeltaHeads, tp: TensorParallel) -> tuple[list, list]:
        """Locate a rank's parts of [q, k, v, z] and [b, a] in a checkpoint: see ScatteredColumnParallelLinear."""
        raise NotImplementedError

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        if layer_index in config.hybrid.attention_layers:
            mixer: nn.Module = GatedAttention(config, rotary_emb)
        else:
            heads = config.hybrid.heads
            weights = cls.delta_net_weights(heads, get_construction().tp)
            state_dtype = getattr(torch, config.hybrid.state_dtype)
            mixer = GatedDeltaNet(config.hidden_size, heads, config.rms_norm_eps, weights, state_dtype)
        return HybridLayer(config, mixer, cls.make_mlp(config, layer_index))

    @staticmethod
    def make_mlp(config: ModelConfig, layer_index: int) -> nn.Module:
        has_experts = config.moe and layer_index in config.moe.layers
        return SharedExpertMoE(config, layer_index) if has_experts else Qwen3MLP(config)

    @classmethod
    def read_config(cls, raw: dict, file: Path) -> dict:
        hybrid, bias = read_hybrid(raw, file), raw.get("attention_bias", False)
        moe = {"moe": Qwen3MoeForCausalLM.read_config(raw, file)["moe"]} if "num_experts" in raw else {}
        fraction = len(hybrid.attention_layers) / hybrid.num_layers
        vision = read_vision(raw, file, image_token_id=248056, mrope_section=(11, 11, 10)) if hybrid.is_nested else None
        fields = {"qkv_bias": bias, "o_bias": bias, "attention_fraction": fraction}
        fields |= {"keeps_states": True, "hybrid": hybrid}
        return fields | moe | {"vision": vision}

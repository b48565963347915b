"""Gemma 3: norms before and after attention and MLP, scaled embeddings, and sliding windows in five of six layers."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.embed_head import ScaledEmbedding
from nanovllm.layers.gated_activation import GeluAndMul
from nanovllm.layers.layernorm import ZeroCenteredRMSNorm, add_and_norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3MLP
from nanovllm.models.shared.windows import WindowsForCausalLM, read_windows
from nanovllm.utils.checks import check_choice, check_real
from nanovllm.utils.nested_names import IMAGE_PREFIXES


class Gemma3Attention(Qwen3Attention):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, config.rms_norm_eps)


class Gemma3DecoderLayer(nn.Module):
    norm_class: type[nn.Module] = ZeroCenteredRMSNorm

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__()
        sizes = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = self.norm_class(*sizes)
        self.self_attn = self_attn
        self.post_attention_layernorm = self.norm_class(*sizes)
        self.pre_feedforward_layernorm = self.norm_class(*sizes)
        self.mlp = mlp
        self.post_feedforward_layernorm = self.norm_class(*sizes)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), as Qwen3DecoderLayer does. The layer's output is x + residual."""
        x, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, x))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.feed_forward(x, residual)), residual

    def feed_forward(self, x: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output for `x`, the normalized `hidden_states`.

        Gemma 4 overrides this method to add experts.
        """
        return self.mlp(x)


class Gemma3ForCausalLM(WindowsForCausalLM):
    norm_class = ZeroCenteredRMSNorm
    may_be_nested, unused_prefixes = True, IMAGE_PREFIXES
    hidden_acts = ("gelu_pytorch_tanh",)
    # transformers' defaults
    defaults: ClassVar = {
        "hidden_act": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        factor = torch.tensor(
            config.hidden_size**0.5, dtype=config.dtype, device="cpu"
        ).item()  # rounded as in transformers
        self.model.embed_tokens = ScaledEmbedding(self.model.embed_tokens, factor)

    @classmethod
    def make_layer(cls, config: ModelConfig, layer_index: int, rotary_emb: RotaryEmbedding) -> nn.Module:
        attention = cls.make_attention(config, rotary_emb)
        return Gemma3DecoderLayer(config, attention, cls.make_mlp(config, layer_index))

    @staticmethod
    def make_attention(config: ModelConfig, rotary_emb: RotaryEmbedding) -> nn.Module:
        return Gemma3Attention(config, rotary_emb)

    @staticmethod
    def make_mlp(config: ModelConfig, layer_index: int) -> nn.Module:
        mlp = Qwen3MLP(config)
        mlp.act_fn = GeluAndMul()
        return mlp

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits, cap = super().compute_logits(hidden_states), self.config.details.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        # transformers does not use this entry of Gemma 3
        raw = raw | {"attn_logit_softcapping": None}
        return read_gemma(raw, file, 6, raw.get("rope_local_base_freq", 1e4))


def read_gemma(
    raw: dict, file: Path, interval: int, local_theta: float | None = None, scales_local: bool = False
) -> dict:
    """Return the fields of ModelConfig that Gemma sets. `read_windows` describes the other parameters."""
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    check_choice(f"{file}: hidden_activation", activation, ("gelu_pytorch_tanh",))
    bidirectional = raw.get("use_bidirectional_attention") or None
    check_choice(f"{file}: use_bidirectional_attention", bidirectional, (None,))
    scalar = check_real(f"{file}: query_pre_attn_scalar", raw.get("query_pre_attn_scalar", 256), low=1e-6, high=1e30)
    caps = [raw.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")]
    for cap in caps:
        check_real(f"{file}: softcapping", 1.0 if cap is None else cap, low=1e-6, high=1e30)
    fields = read_windows(raw, file, interval, local_theta, scales_local)
    fields["details"] = fields["details"]._replace(scale=scalar**-0.5, soft_cap=caps[0], final_soft_cap=caps[1])
    bias = raw.get("attention_bias", False)
    # this length already includes the scaling of the rotary embedding
    return {"qkv_bias": bias, "o_bias": bias, "max_position_embeddings": raw["max_position_embeddings"], **fields}

"""Parts of Gemma 4: experts next to the MLP (26B-A4B), and per-layer embeddings (E2B and E4B)."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.embed_head import ScaledEmbedding, VocabParallelEmbedding
from nanovllm.layers.gated_activation import gelu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from nanovllm.models import ModelConfig
from nanovllm.models.gemma3_text import Gemma3DecoderLayer
from nanovllm.models.qwen3 import Qwen3Model
from nanovllm.moe.experts import Experts, Router, route
from nanovllm.utils.construction import get_construction
from nanovllm.utils.loader import default_weight_loader, parameter


def norm_without_weight(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of x [..., N], computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class PartialQKVLinear(MergedColumnParallelLinear):
    """Like QKVParallelLinear, but without the value projection, or without the key and value projections."""

    def __init__(self, config: ModelConfig, parts: str):
        """`parts` is "qk" if the layer uses keys as values, and "q" if the layer reads another layer's cache."""
        self.parts, tp = parts, get_construction().tp
        heads = [config.num_attention_heads] + [config.num_key_value_heads] * (len(parts) - 1)
        divisions = [tp] + [tp.for_heads(n) for n in heads[1:]]
        super().__init__(config.hidden_size, [n * config.head_dim for n in heads], config.qkv_bias, divisions)

    def shard_ids(self) -> list[tuple]:
        return [(part,) for part in self.parts]


class Gemma4DecoderLayer(Gemma3DecoderLayer):
    norm_class = RMSNorm

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        self.layer_scalar = parameter((1,), default_weight_loader)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().forward(positions, hidden_states, residual)
        return x * self.layer_scalar, residual * self.layer_scalar


class Gemma4Router(nn.Module):
    """Normalizes hidden states, and chooses experts.

    The router's weight for an expert is multiplied by `per_expert_scale`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k, self.eps, self.factor = config.moe.top_k, config.rms_norm_eps, config.hidden_size**-0.5
        self.scale = parameter((config.hidden_size,), default_weight_loader)
        self.proj = Router(config.hidden_size, config.moe)
        self.per_expert_scale = parameter((config.moe.num_experts,), default_weight_loader)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for x [T, hidden_size]. Return weights and expert ids, both [T, top_k]."""
        logits = self.proj(norm_without_weight(x, self.eps) * self.scale * self.factor)
        weights, expert_ids = route(logits, self.top_k, renormalize=True)
        return weights * self.per_expert_scale[expert_ids], expert_ids


class Gemma4ExpertsLayer(Gemma4DecoderLayer):
    """Adds the output of the MLP to the output of the experts.

    MLP and experts have the same input, but separate norms.
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        sizes = config.hidden_size, config.rms_norm_eps
        self.tp = get_construction().tp
        self.post_feedforward_layernorm_1 = RMSNorm(*sizes)
        self.router = Gemma4Router(config)
        self.pre_feedforward_layernorm_2 = RMSNorm(*sizes)
        self.experts = Experts(config.hidden_size, config.moe)
        self.post_feedforward_layernorm_2 = RMSNorm(*sizes)

    def feed_forward(self, x: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.post_feedforward_layernorm_1(self.mlp(x))
        mixed = self.experts(self.pre_feedforward_layernorm_2(hidden_states), *self.router(hidden_states))
        return x + self.post_feedforward_layernorm_2(self.tp.all_reduce(mixed))


class Gemma4PerLayer(Gemma4DecoderLayer):
    """Multiplies each token's embedding for this layer by a gate, and adds a projection of the product."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__(config, self_attn, mlp)
        size = config.details.more.per_layer_size
        self.per_layer_input_gate = ReplicatedLinear(config.hidden_size, size)
        self.per_layer_projection = ReplicatedLinear(size, config.hidden_size)
        self.post_per_layer_input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        embedding: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), as Qwen3DecoderLayer does. `embedding` is [T, size]."""
        x, residual = Gemma3DecoderLayer.forward(self, positions, hidden_states, residual)
        residual = residual + x
        gated = gelu_and_mul(torch.cat((self.per_layer_input_gate(residual), embedding), -1))
        x = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar, residual * self.layer_scalar


class Gemma4PerLayerModel(Qwen3Model):
    """Gives each layer of a model an additional embedding of each token."""

    def __init__(self, model: Qwen3Model, config: ModelConfig):
        nn.Module.__init__(self)  # the base class would allocate another embedding
        self.embed_tokens, self.layers, self.norm = model.embed_tokens, model.layers, model.norm
        self.num_layers, self.factor = config.num_hidden_layers, config.hidden_size**-0.5
        size = config.details.more.per_layer_size
        total_size = self.num_layers * size
        embedding = VocabParallelEmbedding(config.details.more.per_layer_vocab_size, total_size)
        self.embed_tokens_per_layer = ScaledEmbedding(embedding, size**0.5)
        self.per_layer_model_projection = ReplicatedLinear(config.hidden_size, total_size)
        self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        embeddings = self.layer_embeddings(input_ids, hidden_states)
        for layer, embedding in zip(self.layers, embeddings.unbind(1)):
            hidden_states, residual = layer(positions, hidden_states, residual, embedding)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def layer_embeddings(self, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map token ids [T] to the embeddings of all layers, [T, layers, size]."""
        embedded = self.embed_tokens_per_layer(input_ids).unflatten(1, (self.num_layers, -1))
        projected = self.per_layer_model_projection(hidden_states) * self.factor
        projected = self.per_layer_projection_norm(projected.unflatten(1, (self.num_layers, -1)))
        return (projected + embedded) * 2**-0.5


def layer_class(config: ModelConfig) -> type[Gemma4DecoderLayer]:
    if config.moe:
        return Gemma4ExpertsLayer
    return Gemma4PerLayer if config.details.more.per_layer_size else Gemma4DecoderLayer

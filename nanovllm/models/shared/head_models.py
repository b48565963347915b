"""Defines draft heads: decoder layers that predict the model's next hidden states.

Row `p` of a head reads the hidden state at position `p` and the embedding of the token at position `p + 1`. The row
predicts the token at position `p + 2`. The row also computes a hidden state, which replaces the model's hidden state at
position `p + 1`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, QKVParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm.spec_decode.head_checkpoint import Eagle3Config
from nanovllm.utils.families import model_class

if TYPE_CHECKING:
    from nanovllm.config import Config


class PagedHidden(NamedTuple):
    """The cache spec of hidden states. A token's hidden state is in the same block as the token's keys and values."""

    size: int
    of_states = False

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        """Return the tensors, with an extra block for padding (slot -1)."""
        shape = 1, num_layers, num_blocks + 1, config.kvcache_block_size, self.size
        return (torch.empty(shape, dtype=config.dtype, device="meta"),)

    def make(self, parts: list[torch.Tensor], config: "Config") -> torch.Tensor:
        return parts[0].flatten(0, 2)  # [slots, size]


class HiddenStates(nn.Module):
    """Stores the model's hidden states by cache slot, for a draft head."""

    cache: torch.Tensor | None = None  # [slots, size]

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def cache_spec(self) -> PagedHidden:
        return PagedHidden(self.size)


class Eagle3Layer(Qwen3DecoderLayer):
    """A decoder layer that computes queries, keys and values from a hidden state and the next token's embedding."""

    def __init__(self, config: Eagle3Config, rotary_emb: RotaryEmbedding):
        layer = config.layer
        plain = model_class(layer.model_type).make_layer(layer, 0, rotary_emb)  # type: ignore[attr-defined]
        super().__init__(layer, plain.self_attn, plain.mlp)
        heads = layer.head_dim, layer.num_attention_heads, layer.num_key_value_heads
        self.self_attn.qkv_proj = QKVParallelLinear(2 * layer.hidden_size, *heads, bias=layer.qkv_bias)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, positions: torch.Tensor, embeddings: torch.Tensor, hidden_states: torch.Tensor):  # type: ignore
        """Map embeddings and hidden states, each [T, hidden_size], to (x, residual), as Qwen3DecoderLayer does."""
        normed = self.hidden_norm(hidden_states)
        x = self.self_attn(positions, torch.cat((self.input_layernorm(embeddings), normed), -1))
        x, residual = self.post_attention_layernorm(x, normed if self.norm_before_residual else hidden_states)
        return self.mlp(x), residual


class Eagle3Head(nn.Module):
    """The head of Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time
    test" (2025).

    For each token, the head reads hidden states from three layers of the model. The head's vocabulary may be smaller
    than the model's.
    """

    packed_modules_mapping: ClassVar = Qwen3ForCausalLM.packed_modules_mapping

    def __init__(self, config: Eagle3Config, max_len: int):
        super().__init__()
        self.config, layer = config, config.layer
        size = layer.hidden_size
        self.embed_tokens = VocabParallelEmbedding(layer.vocab_size, size) if config.has_embeddings else None
        self.hidden_states = HiddenStates(size)  # outputs of `fc`
        self.fc = ColumnParallelLinear(3 * config.target_hidden_size, size)
        self.layers = nn.ModuleList(
            [Eagle3Layer(config, RotaryEmbedding(layer.rope_inv_freq, layer.rope_scale, max_len))]
        )
        self.norm = RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, size)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))  # of the columns of `lm_head`

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], which replace the model's hidden states at the next positions."""
        x, residual = self.layers[0](positions, embeddings, hidden_states)
        return residual + x

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states [S, hidden_size] to the model's logits, with -inf outside the head's vocabulary."""
        logits = self.lm_head(self.norm(hidden_states))
        all_logits = logits.new_full((len(logits), self.config.layer.vocab_size), -torch.inf)
        return all_logits.index_copy_(1, self.token_ids, logits)

    def map_vocabulary(self, offsets: torch.Tensor, folder: Path) -> None:
        """Set the vocabulary: the head's token `i` is the model's token `i + offsets[i]`.

        Raises a ValueError that names `folder` if the offsets are invalid."""
        size, vocab_size = self.config.draft_vocab_size, self.config.layer.vocab_size
        if offsets.shape != (size,):
            raise ValueError(f"{folder}: d2t: the checkpoint has shape {list(offsets.shape)}, the model needs [{size}]")
        token_ids = offsets + torch.arange(size)
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) < size:
            raise ValueError(f"{folder}: d2t: must lead to different token ids from 0 to {vocab_size - 1}")
        self.token_ids.copy_(token_ids)


class MtpHead(nn.Module):
    """The draft head in checkpoints of Qwen3.5 and Qwen3-Next ("multi-token prediction").

    The head is one full-attention layer, which reads the model's final hidden states. The head uses the embedding and
    the output matrix of the model.
    """

    packed_modules_mapping: ClassVar = Qwen3ForCausalLM.packed_modules_mapping

    def __init__(self, config: ModelConfig, max_len: int):
        super().__init__()
        size = config.hidden_size
        make_layer = model_class(config.model_type).make_layer  # type: ignore[attr-defined]
        self.hidden_states = HiddenStates(size)
        self.pre_fc_norm_embedding = ZeroCenteredRMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCenteredRMSNorm(size, config.rms_norm_eps)
        self.fc = ColumnParallelLinear(2 * size, size)
        rotary_emb = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, max_len)
        self.layers = nn.ModuleList([make_layer(config, min(config.hybrid.attention_layers), rotary_emb)])
        self.norm = ZeroCenteredRMSNorm(size, config.rms_norm_eps)

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute hidden states [T, hidden_size] that replace the model's final hidden states at the next positions."""
        normed = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden_states)
        x, residual = self.layers[0](positions, self.fc(torch.cat(normed, -1)), None)
        return self.norm(x, residual)[0]

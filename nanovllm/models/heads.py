"""Heads that draft: a decoder layer that continues a model's hidden states.

Row p of a head has a hidden state of position p and the embedding of the token of position p + 1. It predicts the token
after that, and a hidden state in the place of the model's at p + 1.
"""

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, QKVParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig, model_class
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderMLP
from nanovllm.models.hybrid import ZeroCenteredRMSNorm
from nanovllm.spec_decode.head_checkpoint import Eagle3Config
from nanovllm.utils.tensor_parallel import PartialSum, TensorParallel


class PagedHidden(NamedTuple):
    """The spec of hidden states: a row of each token, in the blocks that hold its keys and values."""

    size: int
    of_states = False

    def tensors(self, num_layers: int, num_blocks: int, config: Any) -> tuple[torch.Tensor, ...]:
        """With one block more: its last slot, -1, is that of padding."""
        shape = 1, num_layers, num_blocks + 1, config.kvcache_block_size, self.size
        return (torch.empty(shape, dtype=config.dtype, device="meta"),)

    def make(self, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
        return parts[0].flatten(0, 2)  # [slots, size]


class HiddenStates(nn.Module):
    """What a head reads of each token of the model, by cache slot."""

    cache: torch.Tensor | None = None  # [slots, size]

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def cache_spec(self) -> PagedHidden:
        return PagedHidden(self.size)


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose queries, keys and values also read the embedding of the next token."""

    def __init__(self, config: Eagle3Config, backend: AttentionBackend, tp: TensorParallel):
        layer = config.layer
        super().__init__(layer, DecoderMLP(layer, tp), backend, tp)
        heads = layer.head_dim, layer.num_attention_heads, layer.num_key_value_heads
        self.self_attn.qkv_proj = QKVParallelLinear(2 * layer.hidden_size, *heads, layer.qkv_bias, tp, layer.dtype)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, layer.dtype)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, x: PartialSum, residual: torch.Tensor | None, cos_sin: torch.Tensor):
        """`x` are embeddings and `residual` hidden states [T, hidden_size], which may be overwritten."""
        assert residual is not None
        normed = self.hidden_norm(PartialSum(residual)).tensor()
        both = torch.cat((self.input_layernorm(x).tensor(), normed), -1)
        added = self.self_attn(both, cos_sin)
        after = self.post_attention_layernorm(added, normed if self.norm_before_residual else residual)
        return self.mlp(after), after.residual


class Eagle3Head(nn.Module):
    """After Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time test"
    (2025): it reads three hidden states of the model, and has logits of a part of the vocabulary.
    """

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping

    def __init__(self, config: Eagle3Config, max_len: int, backend: AttentionBackend):
        super().__init__()
        self.config, tp, layer = config, TensorParallel(), config.layer
        size, dtype = layer.hidden_size, layer.dtype
        self.embed_tokens = VocabParallelEmbedding(layer.vocab_size, size, tp, dtype) if config.has_embeddings else None
        self.hidden_states = HiddenStates(size)  # products of `fc`
        self.fc = ColumnParallelLinear(3 * config.target_hidden_size, size, False, tp, dtype)
        self.rotary_emb = RotaryEmbedding(layer.rope_inv_freq, layer.rope_scale, max_len)
        self.layers = nn.ModuleList([Eagle3Layer(config, backend, tp)])
        self.norm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, size, tp, dtype)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))  # of what `lm_head` tells

    def forward(self, embeddings: PartialSum, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows [T] -> hidden states [T, hidden_size] in the place of the model's at the next positions."""
        cos_sin = self.rotary_emb(positions)  # first, as in models/decoder.py
        x, residual = self.layers[0](embeddings, hidden_states, cos_sin)
        return residual + x.reduce()

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [S, hidden_size] -> logits of the model's vocabulary, -inf where the head has no token."""
        logits = self.lm_head(self.norm(PartialSum(hidden_states)).tensor())
        of_all = logits.new_full((len(logits), self.config.layer.vocab_size), -torch.inf)
        return of_all.index_copy_(1, self.token_ids, logits)

    def map_vocabulary(self, offsets: torch.Tensor, folder: Path) -> None:
        """Token i of the head is token i + offsets[i] of the model. ValueError that names `folder` if that can't be."""
        size, vocab_size = self.config.draft_vocab_size, self.config.layer.vocab_size
        if offsets.shape != (size,):
            raise ValueError(f"{folder}: d2t: the checkpoint has shape {list(offsets.shape)}, the model needs [{size}]")
        token_ids = offsets + torch.arange(size)
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) < size:
            raise ValueError(f"{folder}: d2t: must lead to different token ids from 0 to {vocab_size - 1}")
        self.token_ids.copy_(token_ids)


class MtpHead(nn.Module):
    """The head that Qwen3.5 and Qwen3-Next have in their own checkpoints ("multi-token prediction").

    It is a layer of the model, with full attention, that begins with the model's last hidden states. Embeddings and
    logits are the model's.
    """

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping

    def __init__(self, config: ModelConfig, max_len: int, backend: AttentionBackend):
        super().__init__()
        size, tp = config.hidden_size, TensorParallel()
        make_layer = model_class(config.model_type).make_layer  # type: ignore[attr-defined]
        self.hidden_states = HiddenStates(size)
        self.pre_fc_norm_embedding = ZeroCenteredRMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCenteredRMSNorm(size, config.rms_norm_eps)
        self.fc = ColumnParallelLinear(2 * size, size, False, tp, config.dtype)
        self.rotary_emb = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, max_len)
        self.layers = nn.ModuleList([make_layer(config, min(config.hybrid.attention_layers), backend, tp)])
        self.norm = ZeroCenteredRMSNorm(size, config.rms_norm_eps)

    def forward(self, embeddings: PartialSum, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows [T] -> hidden states [T, hidden_size] in the place of the model's last ones at the next positions."""
        cos_sin = self.rotary_emb(positions)  # first, as in models/decoder.py: the concatenation is an ordinary launch
        normed = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(PartialSum(hidden_states))
        x = self.fc(torch.cat([x.tensor() for x in normed], -1))
        return self.norm(*self.layers[0](PartialSum(x), None, cos_sin)).tensor()

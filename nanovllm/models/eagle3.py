"""The head of EAGLE-3: a decoder layer that continues a model's hidden states.

After Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time test" (2025).
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
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderMLP
from nanovllm.spec_decode.eagle3_checkpoint import Eagle3Config
from nanovllm.utils.loader import weight_loaders
from nanovllm.utils.refusals import bad_tensors, other_tensors
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


class HiddenStates(ColumnParallelLinear):
    """Three hidden states of the model [T, 3 * its size] to one of the head, which is kept by cache slot."""

    cache: torch.Tensor | None = None  # [slots, size]

    def cache_spec(self) -> PagedHidden:
        return PagedHidden(self.weight.shape[0])


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
    """Row p has the hidden state of position p and the token of position p + 1, and predicts what follows that."""

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping

    def __init__(self, config: Eagle3Config, max_len: int, backend: AttentionBackend):
        super().__init__()
        self.config, tp, layer = config, TensorParallel(), config.layer
        size, dtype = layer.hidden_size, layer.dtype
        self.embed_tokens = VocabParallelEmbedding(layer.vocab_size, size, tp, dtype) if config.has_embeddings else None
        self.fc = HiddenStates(3 * config.target_hidden_size, size, False, tp, dtype)
        self.rotary_emb = RotaryEmbedding(layer.rope_inv_freq, layer.rope_scale, max_len)
        self.layers = nn.ModuleList([Eagle3Layer(config, backend, tp)])
        self.norm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, size, tp, dtype)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))  # of what `lm_head` tells

    def forward(self, embeddings: PartialSum, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows [T] -> hidden states [T, hidden_size] in the place of the model's at the next positions."""
        x, residual = self.layers[0](embeddings, hidden_states, self.rotary_emb(positions))
        return residual + x.reduce()

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [S, hidden_size] -> logits of the model's vocabulary, -inf where the head has no token."""
        logits = self.lm_head(self.norm(PartialSum(hidden_states)).tensor())
        of_all = logits.new_full((len(logits), self.config.layer.vocab_size), -torch.inf)
        return of_all.index_copy_(1, self.token_ids, logits)

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        """Fill it with tensors of `folder`, as `spec_decode/eagle3_checkpoint.py` reads them.

        ValueError that names what is missing, surplus or wrong.
        """
        loaders, offsets = weight_loaders(self), tensors.get("d2t")
        tensors = {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")}  # of which t2d says the same
        if self.config.draft_vocab_size < self.config.layer.vocab_size and offsets is None:
            raise bad_tensors(folder, ["d2t"], "are missing")
        if tensors.keys() != loaders.keys():
            raise other_tensors(folder, tensors.keys(), loaders.keys())
        for name, (load, shard_id) in loaders.items():
            try:
                filled = load(tensors[name], *shard_id)
            except ValueError as error:
                raise ValueError(f"{folder}: {name}: {error}") from error
            if not filled.isfinite().all():
                raise bad_tensors(folder, [name], f"are NaN or infinite in {filled.dtype}")
        if offsets is not None:
            self._map_vocabulary(folder, offsets.long())

    def _map_vocabulary(self, folder: Path, offsets: torch.Tensor) -> None:
        """Token i of the head is token i + offsets[i] of the model."""
        size, vocab_size = self.config.draft_vocab_size, self.config.layer.vocab_size
        if offsets.shape != (size,):
            raise ValueError(f"{folder}: d2t: the checkpoint has shape {list(offsets.shape)}, the model needs [{size}]")
        token_ids = offsets + torch.arange(size)
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) < size:
            raise ValueError(f"{folder}: d2t: must lead to different token ids from 0 to {vocab_size - 1}")
        self.token_ids.copy_(token_ids)

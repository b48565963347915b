"""Implements draft heads, which read the model's hidden states.

The hidden states are cached with the model's keys and values.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.models.shared.head_models import Eagle3Head, MtpHead
from nanovllm.spec_decode.draft_model import DraftModel
from nanovllm.spec_decode.head_checkpoint import read_mtp_tensors, read_tensors
from nanovllm.utils.construction import constructing
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import weight_loaders
from nanovllm.utils.refusals import bad_tensors, other_tensors
from nanovllm.utils.tensor_parallel import TensorParallel


class Head(DraftModel):
    """A draft head with one layer and a cache of the model's hidden states.

    Each step of the model writes hidden states to the cache slots of its tokens, even if nothing is drafted. The cache
    therefore stays correct after a prefix hit, a fork or a preemption. When the head drafts, it computes its own keys
    and values. The keys and values of one position are called a row. A row also depends on the token at the next
    position. If sequences that share a block have different tokens after the block, the block's last row is exact only
    for the sequence that computed the row last. Drafts of the other sequences may be slightly worse.

    In a chain of drafts, the head writes its own hidden states to the cache. Later in the step, the model overwrites
    the head's hidden states.
    """

    shift = 1

    def make_model(self) -> nn.Module:
        """Return the head's module, with a `HiddenStates` cache and hooks that call `keep` in each step."""
        model = self.runner.model.model
        self.decoder = getattr(model, "language_model", model)  # a multimodal model has this attribute
        self.embed_tokens = self.decoder.embed_tokens
        config = self.runner.config
        with constructing(TensorParallel(), config.dtype):
            return self.make_head(config.speculative_config.draft_model_config, config.max_model_len)

    def make_head(self, config: Any, max_len: int) -> nn.Module:
        raise NotImplementedError

    def keep(self, hidden_states: torch.Tensor) -> None:
        """Copy a step's hidden states [T, size] to the head's cache. The model's CUDA graphs include this method."""
        self.model.hidden_states.cache[get_context().slot_mapping] = hidden_states

    def compute(self, slots: torch.Tensor, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embeddings = self.embed_tokens(self.runner.slot_token_ids[token_slots])
        return self.model(embeddings, positions, self.model.hidden_states.cache[slots])

    def chain(self, token_slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self.model.hidden_states.cache[token_slots] = hidden_states

    def load(self, folder: Path, load_format: str) -> None:
        if load_format == "dummy":
            from nanovllm.utils.dummy_weights import load_dummy

            load_dummy(self.model, weight_loaders(self.model))
        else:
            self.fill(folder)

    def fill(self, folder: Path) -> None:
        raise NotImplementedError


class Eagle3(Head):
    """An EAGLE-3 head reads the inputs of some layers of the model."""

    def make_head(self, config: Any, max_len: int) -> Eagle3Head:
        head = Eagle3Head(config, max_len)
        self.embed_tokens = head.embed_tokens or self.embed_tokens
        self.parts: list[Any] = [None] * len(config.layer_ids)  # hidden states of the current step
        for i, layer_id in enumerate(config.layer_ids):
            watch_input(self.decoder.layers[layer_id], partial(self.capture, i))
        return head

    def capture(self, index: int, hidden_states: torch.Tensor) -> None:
        """Collect the input [T, hidden_size] of a layer."""
        self.parts[index] = hidden_states
        if index == len(self.parts) - 1:
            self.keep(self.model.fc(torch.cat(self.parts, -1)))
            self.parts = [None] * len(self.parts)

    def fill(self, folder: Path) -> None:
        tensors, config = read_tensors(folder), self.model.config
        offsets = tensors.pop("d2t", None)
        tensors.pop("t2d", None)  # redundant: marks the head's tokens
        if offsets is not None:
            self.model.map_vocabulary(offsets.long(), folder)
        elif config.draft_vocab_size < config.layer.vocab_size:
            raise bad_tensors(folder, ["d2t"], "are missing")
        fill(self.model, tensors, folder)


def watch_input(layer: nn.Module, use: Callable[[torch.Tensor], None]) -> None:
    """Call `use` in each step, with a copy of the layer's input [T, hidden_size].

    In most fused layers, the norm before the MLP gets the layer's input as the residual. A hook on the layer would have
    to compute the layer's input separately, so a hook on this norm is cheaper.
    """

    def at_norm(norm: nn.Module, args: tuple) -> None:
        use(args[1].clone())  # the norm may overwrite it

    def at_layer(layer: nn.Module, args: tuple) -> None:
        _, hidden_states, residual = args[:3]
        use(hidden_states.clone() if residual is None else hidden_states + residual)

    if hasattr(layer, "fused") and hasattr(layer, "input_layernorm"):
        norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        norm.register_forward_pre_hook(at_norm)
    else:
        layer.register_forward_pre_hook(at_layer)


class Mtp(Head):
    """A head for multi-token prediction (MTP). The MTP head uses the output head of the model."""

    def make_head(self, config: Any, max_len: int) -> MtpHead:
        self.decoder.register_forward_hook(lambda model, args, output: self.keep(output))
        return MtpHead(config, max_len)

    def fill(self, folder: Path) -> None:
        fill(self.model, read_mtp_tensors(folder, self.runner.model.config.quantization), folder)

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor) -> torch.Tensor:
        return self.runner.model.compute_logits(hidden_states)


@torch.no_grad()
def fill(head: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Load tensors from `folder` into a head.

    If tensors are missing, unexpected or wrong, raise a ValueError that names these tensors.
    """
    loaders = weight_loaders(head)
    if any(name.startswith("layers.0.mlp.experts.") for name in loaders):
        from nanovllm.moe.expert_weights import split_experts

        split_experts(loaders, head, tensors)
    if tensors.keys() != loaders.keys():
        raise other_tensors(folder, tensors.keys(), loaders.keys())
    for name, (load, shard_id) in loaders.items():
        try:
            filled = load(tensors[name], *shard_id)
        except ValueError as error:
            raise ValueError(f"{folder}: {name}: {error}") from error
        if filled is not None and not filled.isfinite().all():
            raise bad_tensors(folder, [name], f"are NaN or infinite in {filled.dtype}")

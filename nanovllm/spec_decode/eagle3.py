"""A head of EAGLE-3 drafts from the hidden states of the model, which are kept beside its keys and values."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.models.eagle3 import Eagle3Head
from nanovllm.spec_decode.draft_model import DraftModel
from nanovllm.spec_decode.eagle3_checkpoint import read_tensors
from nanovllm.utils.context import get_context


class Eagle3(DraftModel):
    """What the head reads of a token is written in each step of the model, by cache slot, whether it drafts or not.

    So a hit, a fork or a preemption leaves it right, and the head computes rows when it is to draft, as a draft model
    does. A row needs the token of the next position. In a block that sequences share, the last row is that of the
    sequence which has computed it last; the others' drafts may be a little worse.

    In a chain of drafts, the head's own hidden states are written in the place of the model's. In the same step, the
    model computes these positions and overwrites them.
    """

    shift = 1

    def make_model(self) -> Eagle3Head:
        config = self.runner.config
        head = Eagle3Head(config.speculative_config.draft_model_config, config.max_model_len, self.backend)
        self.embed_tokens = head.embed_tokens or self.runner.model.model.embed_tokens
        self.parts: list[Any] = [None] * len(head.config.layer_ids)  # hidden states of a step, so far
        for i, layer_id in enumerate(head.config.layer_ids):
            self.runner.model.model.layers[layer_id].self_attn.register_forward_hook(partial(self.capture, i))
        return head

    def load(self, folder: Path, load_format: str) -> None:
        if load_format == "dummy":
            from nanovllm.utils.dummy_weights import load_dummy
            from nanovllm.utils.loader import weight_loaders

            load_dummy(self.model, weight_loaders(self.model))
        else:
            self.model.load(read_tensors(folder), folder)

    def capture(self, index: int, attention: nn.Module, args: tuple, output: Any) -> None:
        """Take the hidden states before a layer [T, hidden_size], when its attention has computed their norm.

        A CUDA graph of the model contains this.
        """
        self.parts[index] = args[0].residual.clone()  # which the layer overwrites
        if index == len(self.parts) - 1:
            hidden_states = self.model.fc(torch.cat(self.parts, -1))
            self.model.fc.cache[get_context().slot_mapping] = hidden_states
            self.parts = [None] * len(self.parts)

    def compute(self, slots: torch.Tensor, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embeddings = self.embed_tokens(self.runner.slot_token_ids[token_slots])
        return self.model(embeddings, positions, self.model.fc.cache[slots])

    def chain(self, token_slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self.model.fc.cache[token_slots] = hidden_states

"""Models whose checkpoints contain a text model and a vision tower."""

from typing import Any

import torch
from torch import nn

from nanovllm.models import ModelConfig
from nanovllm.vision.mrope import MRotaryEmbedding
from nanovllm.vision.tower import VisionTower

TOWER_PREFIX = "model.visual."


class NestedModel(nn.Module):
    """Contains a decoder, `language_model`, and optionally a VisionTower, `visual`.

    Checkpoints also use the names `language_model` and `visual`.
    """

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.language_model(token_ids, positions)


def nest(model: Any, config: ModelConfig) -> None:
    """Wrap a family's decoder in a NestedModel. If the engine accepts images, add the vision tower and M-RoPE."""
    layers = model.model.layers
    model.model = NestedModel(model.model)
    if config.vision is None:
        return
    model.model.visual = VisionTower(config.vision)
    model.unused_prefixes = tuple(prefix for prefix in model.unused_prefixes if prefix != TOWER_PREFIX)
    rope = config.rope_inv_freq, config.rope_scale, config.max_position_embeddings
    rotary_emb = MRotaryEmbedding(*rope, config.vision.mrope_section)
    for layer in layers:
        if layer.self_attn is not None:
            layer.self_attn.rotary_emb = rotary_emb

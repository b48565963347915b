"""SmolLM3: a Llama in which every fourth layer has no rotary embedding (NoPE)."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from nanovllm.models import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.utils.checks import check_int


class NoRope(nn.Module):
    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k


class SmolLM3ForCausalLM(LlamaForCausalLM):
    defaults: ClassVar = {"tie_word_embeddings": True, "rope_theta": 2e6}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        no_rope = NoRope()
        for layer, has_rope in zip(self.model.layers, config.details, strict=True):
            if not has_rope:
                layer.self_attn.rotary_emb = no_rope

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        num_layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
        check_int(f"{file}: no_rope_layer_interval", interval, low=1)
        has_rope = raw.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(num_layers)]
        if len(has_rope) < num_layers:
            raise ValueError(f"{file}: no_rope_layers: lists {len(has_rope)} layers, not {num_layers}")
        # unlike in Llama, `pretraining_tp` changes nothing
        return LlamaForCausalLM.read_config(raw | {"pretraining_tp": 1}, file) | {
            "details": tuple(map(bool, has_rope[:num_layers]))
        }

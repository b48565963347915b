"""Qwen3-VL with mixtures of experts: Qwen3-MoE with a vision tower. Checkpoints may store the experts transposed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from nanovllm.models import ModelConfig
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.qwen3_vl import read_qwen3_vision
from nanovllm.models.shared.nested import TOWER_PREFIX, nest
from nanovllm.moe.experts import Experts


def load_any_order(load: Callable, shape: tuple[int, int], param: torch.Tensor, weight: Any, *shard_id: int) -> Any:
    """Load a stack of expert weights. Each weight has the shape `shape`, or the transposed shape."""
    if not (callable(weight) or shard_id):  # random numbers have any shape; single experts are never transposed
        stored = weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape()
        weight = weight[:].transpose(1, 2) if tuple(stored[1:]) == shape[::-1] != shape else weight
    return load(param, weight, *shard_id)


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    unused_prefixes = (TOWER_PREFIX,)
    # transformers' defaults
    defaults: ClassVar = {
        "rope_theta": 5e5,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        nest(self, config)
        for experts in (module for module in self.modules() if isinstance(module, Experts)):
            gate_up, down = (2 * experts.size, experts.hidden_size), (experts.hidden_size, experts.size)
            for param, shape in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
                param.weight_loader = partial(load_any_order, param.weight_loader, shape)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return Qwen3MoeForCausalLM.read_config(raw, file) | read_qwen3_vision(raw, file)

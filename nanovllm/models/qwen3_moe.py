"""Qwen3-MoE: Qwen3 with mixtures of experts as feed-forward layers. Checkpoints can declare some layers dense."""

from pathlib import Path

from torch import nn

from nanovllm.models import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP
from nanovllm.moe.experts import MoE
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.utils.checks import check_int


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def make_mlp(config: ModelConfig, layer_index: int) -> nn.Module:
        has_experts = config.moe and layer_index in config.moe.layers
        return MoE(config.hidden_size, config.moe) if has_experts else Qwen3MLP(config)

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        """Return the fields of ModelConfig that Qwen3 sets, and the field `moe`.

        Entries that config.json lacks get the defaults of transformers.
        """
        num_experts = check_int(f"{file}: num_experts", raw.get("num_experts", raw.get("num_local_experts")), low=1)
        top_k = check_int(f"{file}: num_experts_per_tok", raw.get("num_experts_per_tok", 8), low=1, high=num_experts)
        size = check_int(f"{file}: moe_intermediate_size", raw.get("moe_intermediate_size", 768), low=1)
        step = check_int(f"{file}: decoder_sparse_step", raw.get("decoder_sparse_step", 1), low=1)
        dense_layers = raw.get("mlp_only_layers") or ()
        layers = range(raw["num_hidden_layers"])
        moe_layers = frozenset(i for i in layers if i not in dense_layers and (i + 1) % step == 0)
        moe = MoEConfig(moe_layers, num_experts, top_k, size, renormalize=raw.get("norm_topk_prob", False))
        return Qwen3ForCausalLM.read_config(raw, file) | {"moe": moe if moe_layers else None}

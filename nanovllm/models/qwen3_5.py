"""Qwen3.5 and 3.6, dense: the text model in checkpoints with or without a vision part."""

from typing import ClassVar

from nanovllm.delta_net.gated_delta_net import DeltaHeads, ranges_of_rank
from nanovllm.models.shared.hybrid import HybridForCausalLM
from nanovllm.utils.tensor_parallel import TensorParallel


class Qwen3_5ForCausalLM(HybridForCausalLM):
    packed_modules_mapping: ClassVar = HybridForCausalLM.packed_modules_mapping | {
        "in_proj_qkv": ("in_proj_qkvz", 0),
        "in_proj_z": ("in_proj_qkvz", 1),
        "in_proj_b": ("in_proj_ba", 0),
        "in_proj_a": ("in_proj_ba", 1),
    }

    @staticmethod
    def delta_net_weights(heads: DeltaHeads, tp: TensorParallel) -> tuple[list, list]:
        in_order = heads.sizes, heads.sizes[2:], (heads.num_values,), (heads.num_values,)
        qkv, z, b, a = ((sum(sizes), ranges_of_rank(sizes, tp)) for sizes in in_order)
        return [qkv, z], [b, a]

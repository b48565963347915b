"""Fuses mixtures of experts with the norm before the router. The next norm completes the sums."""

from typing import Any

import torch
from torch import nn

from nanovllm.fused.decoder import FusedMLP
from nanovllm.fused.forms import Fused
from nanovllm.fused.fused_linear import UNQUANTIZED, are_known, is_swiglu
from nanovllm.fused.norm_input import Normed, NormInput
from nanovllm.kernels import operation
from nanovllm.moe.experts import ClampedSwiGLU, Experts, route
from nanovllm.utils.context import get_context
from nanovllm.utils.partial_sum import Compute, PartialSum, sum_over_ranks


@operation
def mix_experts(x: NormInput, layer: Any, slot_mapping: torch.Tensor) -> PartialSum:
    """Compute a MoE layer for the norm x [T, hidden]. Return a sum over the ranks: [T, hidden].

    Tokens with a negative slot are padding, whose results are undefined.
    """
    rows = x.tensor()
    routing = route(layer.gate(rows), layer.top_k, layer.renormalize, layer.num_shared)
    return layer.sum_over_ranks(lambda out: layer.experts(rows, *routing), *rows.shape, rows.dtype)


class FusedMoE(Fused):
    """Replaces `MoE.forward`."""

    uses_cuda_graphs = True
    what = "the norm with the router, and with the experts' first product (one row); the sum of a token's experts"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        gate, experts = module.gate, module.experts
        has_router = are_known(gate) and gate.format is UNQUANTIZED  # type: ignore[union-attr]
        has_act = is_swiglu(experts.act_fn) or type(experts.act_fn) is ClampedSwiGLU
        return has_router and type(experts).forward is Experts.forward and has_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused(Normed(x)).reduce()

    def fused(self, x: NormInput) -> PartialSum:
        return mix_experts(x, self, get_context().slot_mapping)

    def sum_over_ranks(self: Any, compute: Compute, *rows_width_dtype: Any) -> PartialSum:
        return sum_over_ranks(self.tp, compute, *rows_width_dtype)


class FusedSharedExpertMoE(FusedMoE):
    """Replaces `SharedExpertMoE.forward`."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and isinstance(module.shared_expert, FusedMLP)

    def fused(self: Any, x: NormInput) -> PartialSum:
        mixed = FusedMoE.fused(self, x)
        if self.num_shared:
            return mixed
        return PartialSum(mixed.reduce() + self.shared_expert_gate(x.tensor(), self.shared_expert.fused(x).reduce()))

"""Fuses mixtures of experts with the norm before the router.

The kernel of the next norm also adds up the results of the ranks.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.fused.decoder import FusedMLP
from nanovllm.fused.forms import Fused
from nanovllm.fused.fused_linear import UNQUANTIZED, are_known
from nanovllm.fused.norm_input import Normed, NormInput
from nanovllm.kernels import operation
from nanovllm.kernels.activations import SWIGLU, activation_of
from nanovllm.layers.gated_activation import GatedActivation
from nanovllm.layers.layernorm import rms_norm
from nanovllm.layers.linear import linear
from nanovllm.moe.experts import Experts, route
from nanovllm.utils.context import get_context
from nanovllm.utils.partial_sum import Compute, PartialSum, sum_over_ranks


@operation
def mix_experts(x: NormInput, layer: Any, slot_mapping: torch.Tensor) -> PartialSum:
    """Apply the deferred norm x [T, hidden] and a MoE layer. Return an unfinished sum [T, hidden] over the ranks.

    Tokens with a negative slot are padding, whose results are undefined.
    """
    rows = x.tensor()
    routing = route(layer.gate(rows), layer.top_k, layer.renormalize, layer.num_shared)
    return layer.sum_over_ranks(lambda out: layer.experts(rows, *routing), *rows.shape, rows.dtype)


@operation
def sum_experts(x: torch.Tensor, experts: Any, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Compute `Experts.forward`."""
    return Experts.forward(experts, x, weights, expert_ids)


class FusedExperts(Fused):
    """Replaces `Experts.forward`, for layers that call router and experts separately.

    FusedMoE does not call this form.
    """

    uses_cuda_graphs = True
    what = "the first product and the activation; the sum of a token's experts"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return activation_of(module.act_fn) == SWIGLU or type(module.act_fn) is GatedActivation

    def forward(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return sum_experts(x, self, weights, expert_ids)


class FusedMoE(Fused):
    """Replaces `MoE.forward`."""

    what = "the norm with the router, and with the experts' first product (one row); the sum of a token's experts"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        gate, experts = module.gate, module.experts
        has_router = are_known(gate) and gate.format is UNQUANTIZED  # type: ignore[union-attr]
        return has_router and isinstance(experts, FusedExperts)

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


@operation
def choose_experts(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, factors: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the router's logits x W^T, and choose experts by `route`. Return weights and expert ids, both [T, top_k].

    The expert weights of a token are normalized to add up to 1, and are then multiplied by the experts' `factors`. The
    results for padding, whose slots are -1, are undefined.
    """
    weights, expert_ids = route(linear(x, weight), top_k, renormalize=True)
    return weights * factors[expert_ids], expert_ids


class FusedGemma4Router(Fused):
    """Replaces `Gemma4Router.forward`."""

    what = "the norm with its scale, and the choice of experts"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return are_known(module.proj) and module.proj.format is UNQUANTIZED  # type: ignore[union-attr]

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # the norm may read its weight early, so the weight must not be the result of an operation directly before it
        x, slot_mapping = rms_norm(x, self.scale, self.eps) * self.factor, get_context().slot_mapping
        return choose_experts(x, self.proj.weight, self.top_k, self.per_expert_scale, slot_mapping)

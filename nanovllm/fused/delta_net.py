"""Defines the fused form of the gated delta rule: for few rows, one matmul computes both input projections."""

from typing import Any

import torch
from torch import nn

from nanovllm.fused.forms import Fused
from nanovllm.fused.fused_linear import UNQUANTIZED, are_known, norm_linear, partial_sum, product
from nanovllm.fused.norm_input import Normed, NormInput
from nanovllm.utils.partial_sum import PartialSum

MAX_MERGED_ROWS = 2048  # with more rows, the last tiles of the merged matmul cost more than a second matmul


class FusedGatedDeltaNet(Fused):
    """Replaces `GatedDeltaNet.forward`.

    `in_proj` is the joint weight of both input projections. The weights of the projections are views of `in_proj`.
    `in_proj` is None if a projection is quantized or has a bias.
    """

    what = "both input projections (up to 2,048 rows), with the norm before them (one row)"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return are_known(module.in_proj_qkvz, module.in_proj_ba, output=module.out_proj)

    def prepare(self: Any) -> None:
        self.in_proj, parts = None, (self.in_proj_qkvz, self.in_proj_ba)
        if all(part.format is UNQUANTIZED and part.bias is None for part in parts):
            weights = [part.weight for part in parts]
            like, num_rows = weights[0], sum(map(len, weights))
            self.in_proj = torch.empty(num_rows, like.shape[1], dtype=like.dtype, device=like.device)
            for own, weight in zip(self.in_proj.split([*map(len, weights)]), weights):
                weight.data = own.copy_(weight)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.fused(Normed(x)).reduce()

    def fused(self: Any, x: NormInput) -> PartialSum:
        if self.in_proj is None or len(x) > MAX_MERGED_ROWS:
            inputs = product(self.in_proj_qkvz, x), product(self.in_proj_ba, x)
        else:
            inputs = norm_linear(x, self.in_proj).tensor_split((len(self.in_proj_qkvz.weight),), 1)
        return partial_sum(self.out_proj, self.mix(*inputs))

"""Mixture of experts: a router chooses a few of many feed-forward networks for each token (arXiv:1701.06538)."""

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

import torch
from torch import nn

from nanovllm.kernels import triton_ops
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, Shard, linear
from nanovllm.layers.partial_sum import PartialSum
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import check_shape, parameter
from nanovllm.utils.tensor_parallel import TensorParallel

GATE, UP, DOWN = 0, 1, 2  # the shard ids of an expert's weights


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, top_k] in float32 and expert ids [T, top_k] from the router's logits [T, experts].

    The weights are the largest values of the softmax over all experts; with `renormalize` they add up to 1. Of equal
    logits, the lower expert id comes first.
    """
    logits = logits.float()
    expert_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(-1, expert_ids)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, expert_ids


class ExpertsFormat:
    """How `Experts` store and multiply their weights: in the dtype of the activations; see WeightFormat."""

    # the end of a checkpoint's name for a tensor of one expert, and of the stacked parameter that holds it
    suffixes: ClassVar = {"weight": ""}

    def weight(self, experts: "Experts", name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's weight as a matrix of this dtype."""
        return getattr(experts, name)[index]

    def gemv(self, ops: ModuleType, experts: "Experts", x: torch.Tensor, routing, **options) -> torch.Tensor:
        """`ops.moe_gemv` with these weights."""
        return ops.moe_gemv(x, routing, experts.gate_up_proj, experts.down_proj, experts.first_expert, **options)

    def gemm(self, ops: ModuleType, experts: "Experts", x: torch.Tensor, routing) -> torch.Tensor:
        """`ops.moe_gemm` with these weights."""
        return ops.moe_gemm(x, routing, experts.gate_up_proj, experts.down_proj, experts.first_expert)


class Experts(nn.Module):
    """This rank's part of the experts' weights, stacked: each expert is a SwiGLU network, divided over the ranks.

    With `expert_parallel`, each rank has an equal number of whole experts instead.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        tp: TensorParallel,
        expert_parallel: bool = False,
        dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__()
        self.num_experts, self.hidden_size, self.size = num_experts, hidden_size, size
        # of the two dimensions that could be divided, one is divided over the ranks, and the other over a single one
        self.expert_tp = tp if expert_parallel else TensorParallel()
        self.size_tp = TensorParallel() if expert_parallel else tp
        self.num_local = self.expert_tp.shard_size("experts", num_experts)
        self.first_expert = self.expert_tp.rank * self.num_local
        self.local_size = self.size_tp.shard_size("inner size of the experts", size)
        self.gate_up_proj = parameter((self.num_local, 2 * self.local_size, hidden_size), self._load_gate_up, dtype)
        self.down_proj = parameter((self.num_local, hidden_size, self.local_size), self._load_down, dtype)
        self.act_fn = SiluAndMul()
        self.format = ExpertsFormat()

    def tensors_of_experts(self) -> dict[str, tuple[nn.Parameter, tuple[int, int]]]:
        """The tensors of a checkpoint that has one for each expert and projection, by their names below this module.

        Each belongs to a parameter, whose `weight_loader` takes it with (expert, shard id). The other kind of
        checkpoint has the two stacked parameters under their own names.
        """
        projections = ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")
        return {
            f"{expert}.{name}.{kind}": (getattr(self, stacked + suffix), (expert, shard_id))
            for expert in range(self.num_experts)
            for shard_id, (name, stacked) in enumerate(projections)
            for kind, suffix in self.format.suffixes.items()
        }

    def shard(self, shard_id: int) -> Shard:
        """Of one expert's gate or up [size, hidden], or down [hidden, size]."""
        if shard_id == DOWN:
            return Shard((self.hidden_size, self.size), columns=self.size_tp.own_range(self.size))
        first_row = shard_id * self.local_size
        return Shard((self.size, self.hidden_size), self.size_tp.own_range(self.size), first_row=first_row)

    def _load_gate_up(self, target: torch.Tensor, weight, *expert_and_shard_id: int) -> torch.Tensor | None:
        """All experts' gate and up [experts, 2 * size, hidden], or what `_load_one` takes."""
        if expert_and_shard_id:
            return self._load_one(target, weight, *expert_and_shard_id)
        weight = check_shape(weight, (self.num_experts, 2 * self.size, self.hidden_size))
        experts = slice(self.first_expert, self.first_expert + self.num_local)
        for shard_id in (GATE, UP):
            begin = shard_id * self.size + self.size_tp.rank * self.local_size
            shard = target.narrow(1, shard_id * self.local_size, self.local_size)
            shard.copy_(weight[experts, begin : begin + self.local_size])
        return target

    def _load_down(self, target: torch.Tensor, weight, *expert_and_shard_id: int) -> torch.Tensor | None:
        """All experts' down [experts, hidden, size], or what `_load_one` takes."""
        if expert_and_shard_id:
            return self._load_one(target, weight, *expert_and_shard_id)
        weight = check_shape(weight, (self.num_experts, self.hidden_size, self.size))
        experts = slice(self.first_expert, self.first_expert + self.num_local)
        begin = self.size_tp.rank * self.local_size
        return target.copy_(weight[experts, :, begin : begin + self.local_size])

    def _load_one(self, stacked: torch.Tensor, weight, expert: int, shard_id: int) -> torch.Tensor | None:
        """The part of the stacked weights that is filled with one expert's weight; None if another rank has it."""
        index = expert - self.first_expert
        return self.shard(shard_id).copy(stacked[index], weight) if 0 <= index < self.num_local else None

    def forward(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """The weighted sum [T, hidden] of the outputs of this rank's experts, for x [T, hidden] and its routing.

        It is what the kernels compute, in plain PyTorch: expert by expert, each for the tokens that have chosen it.
        """
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=self.num_experts).tolist()
        for expert, pairs in enumerate(order.split(counts)):  # pair: token * top_k + slot
            index = expert - self.first_expert
            if len(pairs) and 0 <= index < self.num_local:
                token = pairs // expert_ids.shape[1]
                h = self.act_fn(linear(x[token], self.format.weight(self, "gate_up_proj", index, x.dtype)))
                y = linear(h, self.format.weight(self, "down_proj", index, x.dtype)).float()
                y *= weights.flatten()[pairs, None]
                out.index_add_(0, token, y)
        return out.to(x.dtype)


class MoE(nn.Module):
    """A router, and the weighted sum of the `top_k` experts that it chooses for each token.

    The norm before the router is computed here too, as a kernel may do both.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        tp: TensorParallel,
        expert_parallel: bool = False,
        dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__()
        # every rank has the whole router
        self.gate = ColumnParallelLinear(hidden_size, num_experts, bias=False, tp=TensorParallel(), dtype=dtype)
        self.experts = Experts(num_experts, hidden_size, size, tp, expert_parallel, dtype)
        self.top_k, self.renormalize = top_k, renormalize
        self.tp = tp

    def forward(self, x: PartialSum, residual: torch.Tensor | None, norm: RMSNorm) -> tuple[PartialSum, torch.Tensor]:
        """The experts' sum for norm(x + residual), [T, hidden], and x + residual, which may overwrite the residual."""
        if len(x) and (ops := triton_ops(self.gate.weight)) is not None:
            if len(x) <= ops.MAX_GEMV_TOKENS:
                return self._forward_few(ops, x, residual, norm)
            return self._forward_many(ops, x, residual, norm)
        normed, residual = norm.add_rms_norm(x, residual)
        routing = route(self.gate(normed), self.top_k, self.renormalize)
        return PartialSum(self.tp.all_reduce(self.experts(normed, *routing))), residual

    def _forward_few(
        self, ops: ModuleType, x: PartialSum, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[PartialSum, torch.Tensor]:
        """By matrix-vector products."""
        gate = self.gate.weight
        experts = self.experts
        norm_weight = None  # of a norm that is left to the experts
        if len(x) == 1 and (row := x.tensor) is not None:  # a kernel that reads a single row normalizes it as well
            logits = torch.empty((1, 1, len(gate)), dtype=torch.float32, device=row.device)
            _, residual = ops.gemv(row, gate, norm.weight, norm.eps, residual, out=logits[0])
            rows, norm_weight = residual, norm.weight
        else:
            rows, residual = norm.add_rms_norm(x, residual)
            logits = ops.router_logits(rows, gate)
        routing = self._route(ops, logits)

        def compute(out: torch.Tensor | None) -> torch.Tensor:
            return experts.format.gemv(ops, experts, rows, routing, norm_weight=norm_weight, eps=norm.eps, out=out)

        return self._sum_over_ranks(compute, rows), residual

    def _forward_many(
        self, ops: ModuleType, x: PartialSum, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[PartialSum, torch.Tensor]:
        """By grouped products. The next norm adds up each token's `top_k` parts, unless there are several ranks."""
        experts = self.experts
        normed, residual = norm.add_rms_norm(x, residual)
        routing = self._route(ops, ops.router_logits(normed, self.gate.weight))
        parts = experts.format.gemm(ops, experts, normed, routing)
        if self.tp.size == 1:
            return PartialSum(parts.squeeze(0), self.top_k), residual

        def compute(out: torch.Tensor | None) -> torch.Tensor:
            return ops.sum_local_parts(parts, routing, experts.first_expert, experts.num_local, out)

        return self._sum_over_ranks(compute, normed), residual

    def _route(self, ops: ModuleType, logits: torch.Tensor) -> tuple:
        return ops.route(logits, self.top_k, self.renormalize, get_context().slot_mapping)

    def _sum_over_ranks(self, compute: Callable[[torch.Tensor | None], torch.Tensor], like: torch.Tensor) -> PartialSum:
        """The sum over the ranks of what `compute` returns, a tensor `like` [T, hidden]; it writes to its argument."""
        if not self.tp.has_peers:
            return PartialSum(self.tp.all_reduce(compute(None)))
        y = self.tp.peer_sum(1, *like.shape, like.dtype)
        compute(y.parts[0])
        return y

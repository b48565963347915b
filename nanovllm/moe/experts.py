"""Mixture of experts (arXiv:1701.06538): a router chooses a few experts (feed-forward networks) for each token."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.activations import SWIGLU
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.gated_activation import GatedActivation
from nanovllm.layers.linear import ReplicatedLinear, linear
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.utils.construction import get_construction
from nanovllm.utils.loader import Shard, check_shape, parameter
from nanovllm.utils.tensor_parallel import TensorParallel

GATE, UP, DOWN = 0, 1, 2  # the shard ids of an expert's weights


def route(
    logits: torch.Tensor, top_k: int, renormalize: bool, num_shared: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for each token from logits [T, experts].

    Return weights (float32) and expert ids, both [T, top_k + num_shared]. Chosen experts come first. Chosen experts are
    sorted by descending logit, then by ascending id. The shared experts, which every token uses, come last. The weight
    of a chosen expert is its probability in a softmax over all experts that are not shared. If `renormalize` is True,
    the weights of the chosen experts add up to 1. The weight of a shared expert is the sigmoid of its logit.
    """
    logits, gates = logits.float().tensor_split((logits.shape[1] - num_shared,), 1)
    expert_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(-1, expert_ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    if not num_shared:
        return weights, expert_ids
    shared = F.pad(gates[..., None], (0, 1)).softmax(-1)[..., 0]  # sigmoids, row by row: see invariant/cpu_ops.py
    shared_ids = torch.arange(num_shared, device=logits.device).expand_as(shared) + logits.shape[1]
    return torch.cat((weights, shared), 1), torch.cat((expert_ids, shared_ids), 1)


class ExpertsFormat:
    """The weight format of `Experts`.

    In this class, weights have the dtype of the activations. Subclasses in quantization/ define 8-bit and 4-bit
    formats.
    """

    # suffix of one expert's tensor in a checkpoint -> suffix of the stacked parameter that contains this tensor
    suffixes: ClassVar = {"weight": ""}
    is_scaled = False  # whether `stacks` have scales
    is_packed = False  # whether `stacks` are 4-bit weights
    quantizes_activations = False  # whether steps with many tokens quantize activations

    def weight(self, experts: "Experts", name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        return getattr(experts, name)[index]

    def stacks(self, experts: "Experts") -> tuple[Any, Any]:
        """Return the stacked weights of the gate_up and down projections in the form that kernels expect."""
        return experts.gate_up_proj, experts.down_proj


class Experts(nn.Module):
    """This rank's part of the experts, with stacked weights.

    Each expert is a gated feed-forward network, which is divided over the ranks. Shared experts come last in the
    stacks. Checkpoints differ in their names of shared experts, so other modules load shared experts through views of
    the stacks. If `config.expert_parallel` is True, each rank has an equal number of whole experts, and no shared
    experts.
    """

    uses_cuda_graphs = False  # the host reads how many tokens each expert has

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        tp = get_construction().tp
        self.num_experts, self.hidden_size, self.size = config.num_experts, hidden_size, config.intermediate_size
        # the ranks divide either the experts or the experts' inner size; the other dimension is whole on each rank
        self.expert_tp = tp if config.expert_parallel else TensorParallel()
        self.size_tp = TensorParallel() if config.expert_parallel else tp
        self.num_local = self.expert_tp.shard_size("experts", self.num_experts)
        self.first_expert = self.expert_tp.rank * self.num_local
        self.local_size = self.size_tp.shard_size("inner size of the experts", self.size)
        self.num_stacked = self.num_local + config.num_shared
        gate_up, down = (2 * self.local_size, hidden_size), (hidden_size, self.local_size)
        self.gate_up_proj = parameter((self.num_stacked, *gate_up), self._load_gate_up, is_linear=True)
        self.down_proj = parameter((self.num_stacked, *down), self._load_down, is_linear=True)
        self.gate_up_proj_bias = self.down_proj_bias = None
        if config.has_bias:
            self.gate_up_proj_bias = parameter((self.num_local, 2 * self.local_size), self._load_gate_up)
            self.down_proj_bias = parameter((self.num_local, hidden_size), self._load_down_bias)
        self.alternates = config.alternates
        self.activation = config.activation
        self.act_fn = SiluAndMul() if config.activation == SWIGLU else GatedActivation(config.activation)
        self.format = ExpertsFormat()

    def tensors_of_experts(self) -> dict[str, tuple[nn.Parameter, tuple[int, int]]]:
        """Return a dict that maps the name of a tensor of one expert to (parameter, (expert, shard id)).

        Names are relative to this module. The parameter's `weight_loader` takes the tensor, the expert and the shard
        id.
        """
        projections = ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")
        return {
            f"{expert}.{name}.{kind}": (getattr(self, stacked + suffix), (expert, shard_id))
            for expert in range(self.num_experts)
            for shard_id, (name, stacked) in enumerate(projections)
            for kind, suffix in self.format.suffixes.items()
        }

    def shard(self, shard_id: int) -> Shard:
        """Return this rank's shard of a single expert's weight.

        The weights of gate_proj and up_proj are [size, hidden], and the weight of down_proj is [hidden, size].
        """
        if shard_id == DOWN:
            return Shard((self.hidden_size, self.size), columns=self.size_tp.local_slice(self.size))
        first_row = shard_id * self.local_size
        return Shard((self.size, self.hidden_size), self.size_tp.local_slice(self.size), first_row=first_row)

    def _load_gate_up(self, target: torch.Tensor, weight, *expert_and_shard_id: int) -> torch.Tensor | None:
        """Load the gate and up weights [experts, 2 * size, hidden] of all experts, or one weight of one expert.

        Also load the biases of all experts, [experts, 2 * size].
        """
        if expert_and_shard_id:
            return self._load_one(target, weight, *expert_and_shard_id)
        weight = check_shape(weight, (self.num_experts, 2 * self.size, self.hidden_size)[: target.dim()])
        experts, target = slice(self.first_expert, self.first_expert + self.num_local), target[: self.num_local]
        for shard_id in (GATE, UP):
            begin = shard_id * self.size + self.size_tp.rank * self.local_size
            shard = target.narrow(1, shard_id * self.local_size, self.local_size)
            shard.copy_(weight[experts, begin : begin + self.local_size])
        return target

    def _load_down(self, target: torch.Tensor, weight, *expert_and_shard_id: int) -> torch.Tensor | None:
        """Load the down weights [experts, hidden, size] of all experts, or the weight of one expert."""
        if expert_and_shard_id:
            return self._load_one(target, weight, *expert_and_shard_id)
        weight = check_shape(weight, (self.num_experts, self.hidden_size, self.size))
        experts = slice(self.first_expert, self.first_expert + self.num_local)
        begin = self.size_tp.rank * self.local_size
        return target[: self.num_local].copy_(weight[experts, :, begin : begin + self.local_size])

    def _load_down_bias(self, target: torch.Tensor, weight) -> torch.Tensor:
        weight = check_shape(weight, (self.num_experts, self.hidden_size))
        target.copy_(weight[self.first_expert : self.first_expert + self.num_local])
        return target if self.size_tp.rank == 0 else target.zero_()  # the sum over ranks must contain the bias once

    def _load_one(self, stacked: torch.Tensor, weight, expert: int, shard_id: int) -> torch.Tensor | None:
        """Load one expert's weight. Return the loaded part of the stack, or `None` if another rank has the expert."""
        index = expert - self.first_expert
        return self.shard(shard_id).copy(stacked[index], weight) if 0 <= index < self.num_local else None

    def forward(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden] to [T, hidden], the weighted sum of the outputs of this rank's experts.

        `weights` and `expert_ids` [T, choices] come from `route`.
        """
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=self.first_expert + self.num_stacked).tolist()
        for expert, pairs in enumerate(order.split(counts)):  # pair: token * top_k + choice
            index = expert - self.first_expert
            if len(pairs) and 0 <= index < self.num_stacked:
                token = pairs // expert_ids.shape[1]
                h = self.act_fn(self.linear(x[token], "gate_up_proj", index))
                y = self.linear(h, "down_proj", index).float()
                y *= weights.flatten()[pairs, None]
                out.index_add_(0, token, y)
        return out.to(x.dtype)

    def linear(self, x: torch.Tensor, name: str, index: int) -> torch.Tensor:
        """Multiply x [rows, inputs] by one local expert's weight, and add the bias.

        `name` is the attribute name of the stacked weight.
        """
        bias = getattr(self, f"{name}_bias")
        return linear(x, self.format.weight(self, name, index, x.dtype), None if bias is None else bias[index])


class Router(ReplicatedLinear):
    """A layer that computes each token's logits for all experts.

    Checkpoints store the router's rows for shared experts separately.
    """

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__(hidden_size, config.num_experts + config.num_shared, config.has_bias)
        self.num_experts = config.num_experts
        self.output_sizes = [config.num_experts]  # for families that rename the router: see load_whole

    def shard(self) -> Shard:
        return Shard((self.num_experts, self.weight.shape[1]))


class MoE(nn.Module):
    """A router chooses experts for each token. The layer's output is a weighted sum of the experts' outputs."""

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.tp = get_construction().tp
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.top_k, self.renormalize, self.num_shared = config.top_k, config.renormalize, config.num_shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden_size] to [T, hidden_size]."""
        routing = route(self.gate(x), self.top_k, self.renormalize, self.num_shared)
        return self.tp.all_reduce(self.experts(x, *routing))

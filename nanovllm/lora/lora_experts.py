"""Adds the results of low-rank adapters to the matmuls of a mixture of experts.

Each expert has its own A and B. The gate and up projections are adapted before the activation. The experts are
therefore computed in three steps: gate and up projections, activation, down projection. Each pair of a token and a
chosen expert is one row.
"""

from typing import Any

import torch

from nanovllm.kernels import operation
from nanovllm.lora.lora_linear import LoRAStack, StepAdapters, add_lora
from nanovllm.moe.experts import Experts
from nanovllm.utils.context import of_tokens
from nanovllm.utils.replace import replace_methods

MAX_TOKENS = 4096  # tokens that are computed at a time; few, because each token has `top_k` rows


@operation
def expert_linear(x: torch.Tensor, experts: Any, name: str, expert_ids: torch.Tensor) -> torch.Tensor:
    """Multiply each row of x [P, inputs] by the weight of the row's expert, and add the bias. Return [P, outputs].

    `name` is "gate_up_proj" or "down_proj", and `expert_ids` is [P]. If the expert of a row is on another rank, the
    row's result is zero.
    """
    outputs = experts.hidden_size if name == "down_proj" else 2 * experts.local_size
    y, indices = x.new_zeros(len(x), outputs), expert_ids - experts.first_expert
    for index in indices.unique().tolist():
        if 0 <= index < experts.num_local:
            rows = (indices == index).nonzero().flatten()
            y[rows] = experts.linear(x[rows], name, index)
    return y


class AdaptedExperts:
    """Replaces `Experts.forward` in mixtures whose experts can have adapters.

    slots_of_requests: see AdapterStacks.
    gate_up_adapters, down_adapters: a LoRAStack for each of the stacked weights.
    """

    uses_cuda_graphs = True  # the sizes do not depend on the routing, and kernels replace the definitions
    slots_of_requests: torch.Tensor
    gate_up_adapters: LoRAStack
    down_adapters: LoRAStack

    def forward(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Compute `Experts.forward`, and apply the adapter of each token."""
        of_all = x, weights, expert_ids, of_tokens(self.slots_of_requests)
        return torch.cat([self._mix(*rows) for rows in zip(*(tensor.split(MAX_TOKENS) for tensor in of_all))])

    def _mix(
        self: Any, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        top_k, expert_ids = weights.shape[1], expert_ids.flatten()
        x, slots = x.repeat_interleave(top_k, 0), slots.repeat_interleave(top_k)
        index = expert_ids - self.first_expert
        has_adapter = (slots >= 0) & (index >= 0) & (index < self.num_local)
        rows_of_adapters = torch.where(has_adapter, slots * self.num_local + index, -1).int()
        rows = StepAdapters(rows_of_adapters, len(self.down_adapters.a))
        h = expert_linear(x, self, "gate_up_proj", expert_ids)
        h = self.act_fn(add_lora(h, x, self.gate_up_adapters, rows))
        y = expert_linear(h, self, "down_proj", expert_ids)
        add_lora(y, h, self.down_adapters, rows)
        return (y.unflatten(0, weights.shape) * weights[..., None]).sum(1).to(x.dtype)  # in float32


def adapt_experts(experts: Experts, gate_up: LoRAStack, down: LoRAStack, slots_of_requests: torch.Tensor) -> None:
    """Make the Experts object `experts` add the results of adapters to its own results."""
    replace_methods(experts, AdaptedExperts, "Adapted")
    experts.gate_up_adapters, experts.down_adapters = gate_up, down  # type: ignore[assignment]
    experts.slots_of_requests = slots_of_requests  # type: ignore[assignment]

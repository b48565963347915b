"""The configuration of a mixture of experts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.kernels.activations import SWIGLU, Activation

if TYPE_CHECKING:
    from nanovllm.config import Config


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The configuration of the layers with experts. A model family's `read_config` creates the MoEConfig."""

    layers: frozenset[int]  # indices of the layers with experts
    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of an expert
    renormalize: bool  # whether the weights of a token's experts add up to 1
    expert_parallel: bool = False  # each rank has whole experts; our setting, not the checkpoint's
    stacks_shared: bool = True  # whether stacks may contain shared experts, which then can't have adapters; our setting
    num_shared: int = 0  # experts that every token uses: the last ones of the router and of the stacks
    is_next_to_mlp: bool = False  # whether the layers also have an MLP
    has_bias: bool = False  # whether the router and the experts, none of which are shared, have biases
    activation: Activation = SWIGLU
    # whether outputs of gate and up alternate in a checkpoint's stacks; stacks of weights that are not quantized are
    # then [experts, inputs, outputs]
    alternates: bool = False

    def with_settings(self, settings: "Config") -> "MoEConfig":
        return replace(self, expert_parallel=settings.expert_parallel, stacks_shared=not settings.enable_lora)

    @property
    def weights_per_input(self) -> int:
        """Return the number of router and expert weights that a token uses, divided by the hidden size."""
        return self.num_experts + 3 * self.top_k * self.intermediate_size

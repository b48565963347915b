"""The shape of a mixture of experts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """What a family's `read_config` reads of the layers with experts."""

    layers: frozenset[int]  # those that have experts
    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of an expert
    renormalize: bool  # the weights of a token's experts add up to 1
    expert_parallel: bool = False  # each rank has whole experts; our setting, not the checkpoint's
    num_shared: int = 0  # experts that each token has besides: the last ones of the router and of the stacks

    @property
    def weights_per_input(self) -> int:
        """How many weights, of the router and of a token's experts, multiply each number of the layer's input."""
        return self.num_experts + 3 * self.top_k * self.intermediate_size

"""The shape of a mixture of experts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """What a family's `read_config` reads about the layers with experts."""

    layers: frozenset[int]  # indices of the layers with experts
    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of an expert
    renormalize: bool  # whether the weights of a token's experts add up to 1
    expert_parallel: bool = False  # each rank has whole experts; our setting, not the checkpoint's
    num_shared: int = 0  # experts that every token uses: the last ones of the router and of the stacks

    @property
    def weights_per_input(self) -> int:
        """How many weights of the router and of a token's experts each number of the layer's input is multiplied by."""
        return self.num_experts + 3 * self.top_k * self.intermediate_size

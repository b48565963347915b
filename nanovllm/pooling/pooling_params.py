"""The parameters of a request for an embedding, a score or classes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.pooling.task import check_task
from nanovllm.utils.checks import check_bool, check_choice, check_fields, check_int, checked, checks_names

if TYPE_CHECKING:
    from nanovllm.config import Config


@checks_names
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The parameters of a request for an embedding, a score or classes.

    dimensions: how many values at the start of an embedding are kept (Matryoshka embeddings). By default, the
        checkpoint's `truncate_dim` decides, or all values are kept.
    normalize: whether to divide the shortened embedding by its Euclidean norm. The default is the checkpoint's setting.
    use_activation: whether to return scores or probabilities. If False, return logits.
    """

    dimensions: int | None = checked(None, check_int, low=1)
    normalize: bool | None = checked(None, check_bool)
    use_activation: bool = checked(True, check_bool)

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, config: "Config") -> None:
        """Raise ValueError if the engine's model does not support these parameters."""
        if self.dimensions is not None:
            check_task(config, "embed")
            check_int("dimensions", self.dimensions, low=1, high=config.pooling.num_values)
            if config.pooling.dimensions:
                check_choice("dimensions", self.dimensions, config.pooling.dimensions)

"""What only some requests use. A step without such a request carries nothing of it."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.sampling_params import SamplingParams


def register_feature(feature: type[StepFeature]) -> None:
    """Add a feature to all engines that this process makes afterwards; they must have one rank.

    Its `fields` are attributes of a subclass of SamplingParams. Each gets a column, so that `rows.column(name)` has the
    numbers of the requests, and 0 for those that do not ask for the feature.

    ValueError if there is a parameter or a feature of this name, or no column is left.
    """
    from nanovllm.kernels.sampling_columns import COLUMNS, MAX_CUSTOM_COLUMNS, NUM_OWN_COLUMNS  # needs torch

    if feature.__name__ in FEATURES:
        raise ValueError(f"feature {feature.__name__!r}: there is a feature of this name")
    if feature.num_drafts and any(getattr(known.home, "num_drafts", 0) for known in FEATURES.values()):
        raise ValueError(f"num_drafts={feature.num_drafts}: another feature drafts tokens already")
    for name in {*SamplingParams.__dataclass_fields__, *COLUMNS}.intersection(feature.fields):
        raise ValueError(f"field {name!r}: there is a sampling parameter of this name")
    if len(COLUMNS) + len(feature.fields) > NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS:
        columns = f"{MAX_CUSTOM_COLUMNS} columns are there for features from outside"
        raise ValueError(f"fields {[*feature.fields]}: {columns}")
    COLUMNS.update(dict.fromkeys(feature.fields, float))
    FEATURES[feature.__name__] = Feature(feature, dict.fromkeys(feature.fields, 0))


def num_drafts(features: Iterable[type[StepFeature]], config: Any, keeps_states: bool) -> int:
    """How many tokens the features of an engine draft for a sequence; ValueError if settings or layers forbid it."""
    if (size := config.tensor_parallel_size) > 1:
        raise ValueError(f"tensor_parallel_size={size}: must be 1 with features of register_feature")
    number = max(feature.num_drafts for feature in features)
    if number and keeps_states:
        raise ValueError(f"num_drafts={number}: must be 0 with layers that keep a state")
    if number >= (block_size := config.kvcache_block_size):
        bound = f"{block_size - 1}, one less than kvcache_block_size={block_size}"
        raise ValueError(f"num_drafts={number}: must be at most {bound}")
    return number

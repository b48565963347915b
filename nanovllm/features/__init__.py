"""What only some requests use. A step without such a request carries nothing of it."""

from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.sampling_params import SamplingParams


def register_feature(feature: type[StepFeature]) -> None:
    """Add a feature to all engines that this process makes afterwards; they must have one rank.

    Its `fields` are attributes of a subclass of SamplingParams. Each gets a column, so that `rows.column(name)` has the
    numbers of the requests, and 0 for those that do not ask for the feature.

    ValueError if there is a parameter or a feature of this name, or no column is left.
    """
    from nanovllm.kernels.sampling.sampling_columns import COLUMNS, MAX_CUSTOM_COLUMNS, NUM_OWN_COLUMNS  # needs torch

    if feature.__name__ in FEATURES:
        raise ValueError(f"feature {feature.__name__!r}: there is a feature of this name")
    for name in {*SamplingParams.__dataclass_fields__, *COLUMNS}.intersection(feature.fields):
        raise ValueError(f"field {name!r}: there is a sampling parameter of this name")
    if len(COLUMNS) + len(feature.fields) > NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS:
        columns = f"{MAX_CUSTOM_COLUMNS} columns are there for features from outside"
        raise ValueError(f"fields {[*feature.fields]}: {columns}")
    COLUMNS.update(dict.fromkeys(feature.fields, float))
    FEATURES[feature.__name__] = Feature(feature, dict.fromkeys(feature.fields, 0))


def check_ranks(num_ranks: int) -> None:
    """ValueError for several ranks with features of `register_feature`, of which other processes do not know."""
    if any(isinstance(feature.home, type) for feature in FEATURES.values()):
        raise ValueError(f"tensor_parallel_size={num_ranks}: must be 1 with features of register_feature")

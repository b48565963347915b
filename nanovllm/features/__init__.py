"""Implements features that only some requests use.

If no request of a step uses a feature, the feature costs nothing.
"""

from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.sampling_params import SamplingParams


def register_feature(feature: type[StepFeature]) -> None:
    """Add a feature to every engine that this process creates from now on.

    Engines with a registered feature must have a single rank. The feature's `fields` are the names of attributes of a
    subclass of SamplingParams. Each field has a column of numbers on the device. `rows.column(name)` returns the
    field's value for each row, or 0 for requests that do not use the feature.

    Raises ValueError if the feature's name or the name of a field is taken, or if no column is left.
    """
    from nanovllm.kernels.sampling.sampling_columns import COLUMNS, MAX_CUSTOM_COLUMNS, NUM_OWN_COLUMNS  # needs torch

    if feature.__name__ in FEATURES:
        raise ValueError(f"feature {feature.__name__!r}: another feature has this name")
    for name in {*SamplingParams.__dataclass_fields__, *COLUMNS}.intersection(feature.fields):
        raise ValueError(f"field {name!r}: a sampling parameter has this name")
    if len(COLUMNS) + len(feature.fields) > NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS:
        columns = f"registered features may have {MAX_CUSTOM_COLUMNS} columns together"
        raise ValueError(f"fields {[*feature.fields]}: {columns}")
    COLUMNS.update(dict.fromkeys(feature.fields, float))
    fields = dict.fromkeys(feature.fields, 0)
    FEATURES[feature.__name__] = Feature(feature, fields)
    if feature.masks_tokens:  # the feature `logit_edits` applies the masks
        edits = FEATURES["logit_edits"]
        FEATURES["logit_edits"] = edits._replace(defaults={**edits.defaults, **fields})


def check_ranks(num_ranks: int) -> None:
    """Raise ValueError if a feature was registered, because the processes of other ranks do not know the feature."""
    if any(isinstance(feature.home, type) for feature in FEATURES.values()):
        raise ValueError(f"tensor_parallel_size={num_ranks}: must be 1 with registered features")

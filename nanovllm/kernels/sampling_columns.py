"""The sampling parameters of a request on the device: a row of WIDTH int32 words, one column for each parameter.

COLUMNS declares each column once, by its name and its type; kernels look it up by `sampling_params.column_constant`.
The last two words are the seed of the noise.
"""

from collections.abc import Iterable
from typing import NamedTuple

# of the generator of the noise: the smallest number with which it passes every test of BigCrush, say its authors
PHILOX_ROUNDS = 7
MAX_CUSTOM_COLUMNS = 4  # of features that are registered from outside (engine.features.register_feature)


class Column(NamedTuple):
    name: str
    dtype: type  # float (float32, stored as its bits) or int


COLUMNS = [
    Column("temperature", float),
    Column("top_p", float),
    Column("min_p", float),
    Column("top_k", int),
    # of features.logit_edits; 0 for a request without edits
    Column("presence_penalty", float),
    Column("frequency_penalty", float),
    Column("repetition_penalty", float),
    Column("num_prompt_tokens", int),
    Column("min_len", int),
    Column("has_allowed_ids", int),
    Column("is_penalized", int),
    Column("num_biases", int),
    Column("num_stops", int),  # token ids that are banned below min_len
    Column("num_bad_words", int),
]
NUM_OWN_COLUMNS = len(COLUMNS)
WIDTH = -(-(NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS + 2) // 4) * 4


def column_index(name: str) -> int:
    return next(i for i, column in enumerate(COLUMNS) if column.name == name)


FILTERS = slice(column_index("top_p"), column_index("top_k") + 1)
# besides masks, `penalize` has work to do where one of these is not 0
EDITS = slice(column_index("is_penalized"), column_index("num_bad_words") + 1)


def add_columns(names: Iterable[str]) -> None:
    """Columns of float32 numbers; ValueError if one exists, or there is no room."""
    names = [*names]
    for name in names:
        if any(known.name == name for known in COLUMNS):
            raise ValueError(f"field {name!r}: there is a sampling parameter of this name")
    if len(COLUMNS) + len(names) > NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS:
        raise ValueError(f"fields {names}: {MAX_CUSTOM_COLUMNS} columns are there for features from outside")
    COLUMNS.extend(Column(name, float) for name in names)

"""The sampling parameters of a request on the device: a row of WIDTH int32 words, one column for each parameter.

COLUMNS declares each column once: its name, its type, and how the host computes its value. Everything else looks a
column up by name, kernels by `sampling_params.column_constant`. The last two words are the seed of the noise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

GREEDY_BELOW = 1e-5  # float32 logits cannot be divided by a smaller temperature
MAX_CUSTOM_COLUMNS = 4  # of filters that are registered from outside (layers.logits.register_filter)


class Column(NamedTuple):
    name: str
    dtype: type  # float (float32, stored as its bits) or int
    value: Callable[[Any], float]  # of an engine.batch.NewRequest


def param(name: str, dtype: type) -> Column:
    """A column with the value of the field `name` of SamplingParams."""
    return Column(name, dtype, lambda request: getattr(request.params, name))


def _temperature(request: Any) -> float:
    return request.params.temperature if request.params.temperature >= GREEDY_BELOW else 0.0


def _is_penalized(request: Any) -> bool:
    params = request.params
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)


def _has_allowed_ids(request: Any) -> bool:
    return request.params.allowed_token_ids is not None or request.params.structured_outputs is not None


COLUMNS = [
    Column("temperature", float, _temperature),
    param("top_p", float),
    param("min_p", float),
    param("top_k", int),
    param("presence_penalty", float),
    param("frequency_penalty", float),
    param("repetition_penalty", float),
    Column("num_prompt_tokens", int, lambda request: request.num_prompt_tokens),
    Column("min_len", int, lambda request: request.num_prompt_tokens + request.params.min_tokens),
    Column("has_allowed_ids", int, _has_allowed_ids),
    Column("is_penalized", int, _is_penalized),
    Column("num_biases", int, lambda request: len(request.params.logit_bias or ())),
    Column("num_stops", int, lambda request: request.num_stops),  # token ids that are banned below min_len
    Column("num_bad_words", int, lambda request: request.num_bad_words),
]
WIDTH = -(-(len(COLUMNS) + MAX_CUSTOM_COLUMNS + 2) // 4) * 4


def column_index(name: str) -> int:
    return next(i for i, column in enumerate(COLUMNS) if column.name == name)


FILTERS = slice(column_index("top_p"), column_index("top_k") + 1)
# besides masks, `penalize` has work to do where one of these is not 0
EDITS = slice(column_index("is_penalized"), column_index("num_bad_words") + 1)

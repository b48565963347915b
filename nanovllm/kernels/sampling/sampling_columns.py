"""The sampling parameters of a request on the device: a row of WIDTH int32 words, with one column per parameter.

`COLUMNS` declares the name and type of each column. The last two words are the seed of the noise.
"""

from typing import Any

import numpy as np
import torch

# the fewest rounds of the noise generator with which it passes every BigCrush test, according to its authors
PHILOX_ROUNDS = 7
MAX_CUSTOM_COLUMNS = 4  # for features that are registered from outside (features.register_feature)
COLUMNS: dict[str, type] = {  # in this order; float is float32, which is stored as its bits
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    # of features.logit_edits; 0 for a request without edits
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "num_prompt_tokens": int,
    "min_len": int,
    "has_allowed_ids": int,
    "is_penalized": int,
    "num_biases": int,
    "num_stops": int,  # token ids that are banned until there are min_len tokens
    "num_bad_words": int,
}
NUM_OWN_COLUMNS = len(COLUMNS)
WIDTH = -(-(NUM_OWN_COLUMNS + MAX_CUSTOM_COLUMNS + 2) // 4) * 4


def column_index(name: str) -> int:
    return [*COLUMNS].index(name)


# apart from masks, `penalize` has work to do only if one of these columns is not 0
EDITS = slice(column_index("is_penalized"), column_index("num_bad_words") + 1)


def column(params, name: str):
    """Return a column of `params` [S, WIDTH] int32 as a view [S] with the column's type."""
    i = column_index(name)
    if COLUMNS[name] is int:
        return params[:, i]
    return params.view(np.float32 if isinstance(params, np.ndarray) else torch.float32)[:, i]


def seeds(params):
    """Return the noise seeds [S, 2] (low and high word) as a view of the last two columns of `params`."""
    return params[:, WIDTH - 2 :]


def seeds_of(seqs: Any) -> np.ndarray:
    """Return the noise seeds of sequences as [S, 2] int32 (low and high word)."""
    return np.array([seq.noise_seed for seq in seqs], np.uint64).view(np.int32).reshape(-1, 2)


def params_rows(seqs: Any) -> np.ndarray:
    """Return the parameter rows of sequences as [S, WIDTH] int32. Columns of unused features are 0."""
    params = np.zeros((len(seqs), WIDTH), np.int32)
    column(params, "temperature")[:] = [seq.temperature for seq in seqs]
    for name in ("top_p", "min_p", "top_k"):
        column(params, name)[:] = [getattr(seq.params, name) for seq in seqs]
    for i, seq in enumerate(seqs):
        for name, value in seq.columns.items():
            column(params, name)[i] = value
    seeds(params)[:] = seeds_of(seqs)
    return params

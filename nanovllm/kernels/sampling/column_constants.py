"""Gives kernels access to rows of sampling parameters. sampling_columns.py declares the columns of a row."""

import triton
import triton.language as tl

from nanovllm.kernels.sampling import sampling_columns
from nanovllm.kernels.sampling.sampling_columns import column_index

WIDTH = tl.constexpr(sampling_columns.WIDTH)


def column_constants(*names: str) -> list[tl.constexpr]:
    """Return column indices as constants. Kernels can read the constants as global variables."""
    return [tl.constexpr(column_index(name)) for name in names]


TEMPERATURE, TOP_K, TOP_P, MIN_P = column_constants("temperature", "top_k", "top_p", "min_p")


@triton.jit
def is_filtered(params_ptr):
    """Return whether a row is sampled with min-p, top-k or top-p.

    Min-p, top-k and top-p need the logits of the whole vocabulary.
    """
    has_filter = (
        (tl.load(params_ptr + TOP_K) > 0) | (load_float(params_ptr, TOP_P) < 1) | (load_float(params_ptr, MIN_P) > 0)
    )
    return (load_float(params_ptr, TEMPERATURE) > 0) & has_filter


@triton.jit
def load_float(params_ptr, COLUMN: tl.constexpr):
    return tl.load(params_ptr + COLUMN).to(tl.float32, bitcast=True)

"""What a row asks of its logits: the columns of layers.logits' params, by the names of its FIELDS."""

import triton
import triton.language as tl

TEMPERATURE, TOP_P, MIN_P, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY = map(tl.constexpr, range(6))
TOP_K, NUM_PROMPT_TOKENS, MIN_LEN, IS_PENALIZED, NUM_BIASES, NUM_STOPS = map(tl.constexpr, range(6, 12))
HAS_ALLOWED_IDS, NUM_BAD_WORDS = map(tl.constexpr, range(12, 14))


@triton.jit
def is_filtered(asked_ptr):
    """Whether a row wants min-p, top-k or top-p, which take the whole vocabulary."""
    some = (tl.load(asked_ptr + TOP_K) > 0) | (real(asked_ptr, TOP_P) < 1) | (real(asked_ptr, MIN_P) > 0)
    return (real(asked_ptr, TEMPERATURE) > 0) & some


@triton.jit
def real(asked_ptr, COLUMN: tl.constexpr):
    return tl.load(asked_ptr + COLUMN).to(tl.float32, bitcast=True)

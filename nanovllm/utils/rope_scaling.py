"""Computes the frequencies of rotary embeddings, and scales them to contexts that are longer than in training."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm.utils.checks import check_choice, check_real

NUMBERS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
NUMBERS |= {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}  # of yarn
KINDS = "default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"


class RopeFrequencies(NamedTuple):
    inv_freq: torch.Tensor  # [rotated numbers of a head / 2]
    scale: float  # of cos and sin
    max_len: int  # maximum sequence length
    long: tuple[torch.Tensor, int] | None = None  # (frequencies if sequences may exceed a length, this length)


def inverse_frequencies(theta: float, size: int) -> torch.Tensor:
    """Return a tensor [size / 2] with the angle (radians per position) of each rotated pair."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)


def scaled_rope(kind: str, theta: float, rope: dict, raw: Mapping, head_dim: int, file: Path) -> RopeFrequencies:
    """Return the frequencies for a rope type.

    Raises ValueError, TypeError or KeyError if a parameter is missing or wrong. `raw` is the content of config.json.
    `rope` contains the parameters of the rope type. The returned `max_len` is the same as in vLLM. If the type is
    "dynamic", `max_len` is the training length, because longer sequences would change all frequencies. If the type is
    "longrope", `max_model_len` selects the short or the long factors, as in vLLM.
    """
    trained_len, name = raw["max_position_embeddings"], "original_max_position_embeddings"
    if raw.get(name) is not None:
        rope[name] = raw[name]  # takes precedence, as in transformers
    rope.setdefault(name, trained_len)
    for name in NUMBERS & rope.keys():
        check_real(f"{file}: {name}", rope[name], low=1e-6, high=1e30)
    fraction = check_real(f"{file}: partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1e-6, 1.0)
    if kind in ("su", "yarn") and "short_factor" in rope:  # older names of longrope, as in transformers
        kind = "longrope"
    check_choice(f"{file}: rope type", kind, KINDS)
    if kind == "yarn":
        check_real(f"{file}: rope_theta", theta, low=1.0001, high=1e30)
    if kind == "longrope":
        check_real(f"{file}: original_max_position_embeddings", rope["original_max_position_embeddings"], 2, 1e30)
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        factors = rope["low_freq_factor"], rope["high_freq_factor"]
        raise ValueError(f"{file}: high_freq_factor={factors[1]!r}: must be above low_freq_factor={factors[0]!r}")
    if kind == "proportional":  # frequencies as for a fully rotated head, but 0 for the last pairs
        inv_freq = inverse_frequencies(theta, head_dim) / rope.get("factor", 1.0)
        inv_freq[int(head_dim * fraction // 2) :] = 0.0
        return RopeFrequencies(inv_freq, 1.0, trained_len)
    head_dim = int(head_dim * fraction)  # only the rotated numbers
    if kind in ("yarn", "longrope"):
        rope.setdefault("factor", trained_len / rope["original_max_position_embeddings"])
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if kind == "linear":
        return RopeFrequencies(1.0 / periods / rope["factor"], 1.0, int(trained_len * rope["factor"]))
    if kind == "yarn":
        max_len = rope["original_max_position_embeddings"] * rope["factor"]
        return RopeFrequencies(_yarn_frequencies(periods, theta, rope), _yarn_scale(rope), int(max_len))
    if kind == "longrope":
        short, long = (1.0 / (_factors(name, rope, len(periods), file) * periods) for name in ("short", "long"))
        return RopeFrequencies(
            short, _longrope_scale(rope), trained_len, (long, int(rope["original_max_position_embeddings"]))
        )
    return RopeFrequencies(
        _llama3_frequencies(1.0 / periods, rope) if kind == "llama3" else 1.0 / periods, 1.0, trained_len
    )


def _llama3_frequencies(inv_freq: torch.Tensor, rope: dict) -> torch.Tensor:
    """Return the frequencies of Llama 3.1. The frequencies of slow pairs are divided by a factor.

    Fast pairs, which make many turns within the training length, keep their frequencies. Between slow and fast pairs,
    frequencies are interpolated.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    num_turns = rope["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    weight = ((num_turns - low) / (high - low)).clamp(0, 1)  # of the original frequency
    return (1 - weight) * inv_freq / rope["factor"] + weight * inv_freq


def _yarn_frequencies(periods: torch.Tensor, theta: float, rope: dict) -> torch.Tensor:
    """Return the frequencies of YaRN (Peng et al., 2023).

    Unlike Llama 3.1, YaRN interpolates by the index of the pair.
    """
    num_pairs, original_len = len(periods), rope["original_max_position_embeddings"]
    num_turns = rope.get("beta_fast", 32), rope.get("beta_slow", 1)  # in the training length
    first, last = (num_pairs * math.log(original_len / (n * 2 * math.pi), theta) for n in num_turns)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    index = torch.arange(num_pairs, dtype=torch.float32, device="cpu")
    weight = 1 - ((index - first) / (last - first or 0.001)).clamp(0, 1)  # of the original frequency
    return 1.0 / (rope["factor"] * periods) * (1 - weight) + 1.0 / periods * weight


def _yarn_scale(rope: dict) -> float:
    """Return the factor by which cos and sin are multiplied.

    Attention scores are multiplied by the square of this factor, which keeps attention sharp in long contexts.
    """

    def scale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    has_both = rope.get("mscale") and rope.get("mscale_all_dim")
    default = scale(rope["mscale"]) / scale(rope["mscale_all_dim"]) if has_both else scale(1.0)
    return float(rope.get("attention_factor", default))


def _factors(name: str, rope: dict, num_pairs: int, file: Path) -> torch.Tensor:
    """Return the numbers by which LongRoPE divides frequencies.

    The "short" numbers are for contexts up to the original length.
    """
    factors = rope[f"{name}_factor"]
    if not isinstance(factors, list) or len(factors) != num_pairs:
        raise ValueError(f"{file}: {name}_factor={factors!r:.80}: must be a list of {num_pairs} numbers")
    factors = [check_real(f"{file}: {name}_factor: a factor", factor, low=1e-6, high=1e30) for factor in factors]
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


def _longrope_scale(rope: dict) -> float:
    factor, original_len = rope["factor"], rope["original_max_position_embeddings"]
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    return float(rope.get("attention_factor", default))

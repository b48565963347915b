"""Rotary embeddings for longer contexts than those of the training. This file is imported for models that have them."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from nanovllm.utils.checks import check_choice, check_real

NUMBERS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
NUMBERS |= {"attention_factor", "beta_fast", "beta_slow"}  # of yarn


def scaled_frequencies(
    kind: str, inv_freq: torch.Tensor, theta: float, rope: dict, raw: Mapping, head_dim: int, file: Path
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, and the scale of cos and sin.

    `inv_freq` are those without scaling, and `rope` has the other entries of a config.json's `rope_parameters` or
    `rope_scaling`; `raw` is all of that file.
    """
    for name in NUMBERS & rope.keys():
        check_real(f"{file}: {name}", rope[name], low=1e-6, high=1e30)
    if (fraction := rope.pop("partial_rotary_factor", None)) is not None:  # of a head that is rotated
        head_dim = int(head_dim * check_real(f"{file}: partial_rotary_factor", fraction, low=1e-6, high=1.0))
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    check_choice(f"{file}: rope type", kind, ("default", "linear", "yarn", "llama3"))
    if kind == "yarn":
        return _yarn_frequencies(raw, head_dim, theta, rope)
    if kind == "linear":
        inv_freq = inv_freq / rope["factor"]
    elif kind == "llama3":
        inv_freq = _llama3_frequencies(inv_freq, rope)
    return inv_freq, 1.0


def _llama3_frequencies(inv_freq: torch.Tensor, rope: dict) -> torch.Tensor:
    """The frequencies of Llama 3.1: slow pairs turn slower by a factor, and fast ones as before; what is between is
    interpolated. A pair is fast that turns often in the length of the training.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    num_turns = rope["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    weight = ((num_turns - low) / (high - low)).clamp(0, 1)  # of the original frequency
    return (1 - weight) * inv_freq / rope["factor"] + weight * inv_freq


def _yarn_frequencies(raw: Mapping, head_dim: int, theta: float, rope: dict) -> tuple[torch.Tensor, float]:
    """The frequencies of YaRN, as transformers computes them; its import takes seconds."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("max_position_embeddings", "hidden_size", "num_attention_heads")
    shape = {name: raw[name] for name in names} | {"head_dim": head_dim, "rope_theta": theta}
    config = AutoConfig.for_model("llama", **shape, rope_scaling={"rope_type": "yarn", **rope})  # as for any family
    with torch.device("cpu"):
        return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))

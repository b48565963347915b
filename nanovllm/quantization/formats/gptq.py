"""Reads the format GPTQ (arXiv:2210.17323): 4-bit integers, packed along the inputs of a layer.

If `desc_act` is true, the tensor `g_idx` contains the group of each input. Zero points are packed along the outputs. In
version 1, checkpoints store zero points minus 1.
"""

from pathlib import Path

import torch

from nanovllm.quantization.formats.awq import GROUP_SIZES
from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.utils.checks import check_choice


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    check_choice(f"{where}: bits", raw.get("bits"), (4,))
    check_choice(f"{where}: lm_head", raw.get("lm_head", False), (False,))
    version = check_choice(f"{where}: checkpoint_format", raw.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
    group = check_choice(f"{where}: group_size", raw.get("group_size"), GROUP_SIZES)
    has_order = check_choice(f"{where}: desc_act", raw.get("desc_act", False), (False, True)) and group != -1
    tensors = (
        ("qweight", "words", codes_of_inputs),
        ("qzeros", "zeros", zeros if version == "gptq_v2" else zeros_less_one),
        ("scales", "scales", torch.t),
        ("g_idx", "group_ids" if has_order else "contiguous", torch.clone),
    )
    scheme = PackedScheme("int4", None if group == -1 else group, tensors)
    # rules of GPTQModel for modules: "-:" and a regular expression skips modules, "+:" quantizes them in another way
    rules = raw.get("dynamic") or {}
    if other := [rule for rule in rules if not rule.startswith("-:")]:
        raise ValueError(f"{where}: dynamic: {other[0]!r}: only rules that begin with '-:' are supported")
    ignore = tuple(f"re:{rule[2:]}" for rule in rules) + tuple(raw.get("modules_to_not_convert") or ())
    blocks = raw.get("modules_in_block_to_quantize") or ()
    targets = tuple(name for block in blocks for name in ([block] if isinstance(block, str) else block)) or (ALL,)
    return QuantConfig("gptq", ((targets, scheme),), ignore, ("I32",))


def codes_of_inputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [K / 8, N] to codes [N, K]."""
    return nibbles(packed.t())


def zeros(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [groups, N / 8] to zero points [N, groups]."""
    return nibbles(packed).t()


def zeros_less_one(packed: torch.Tensor) -> torch.Tensor:
    return (zeros(packed) + 1) & 15

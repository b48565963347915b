"""Reads the format GPTQ (arXiv:2210.17323): 4-bit integers, packed along the inputs of a layer.

If `desc_act` is true, the tensor `g_idx` contains the group of each input. Zero points are packed along the outputs.
Version 1 of the format stores each zero point minus 1.
"""

from pathlib import Path

import torch

from nanovllm.quantization.formats.awq import GROUP_SIZES, UNREAD
from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import ALL, QuantConfig, check_unread, read_patterns
from nanovllm.utils.checks import check_choice


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    check_choice(f"{where}: bits", raw.get("bits"), (4,))
    check_unread(where, raw, UNREAD | {"is_marlin_format": ()})
    # two names of one entry: the newer one, and the one that older readers know
    versions = {name: str(raw[name]).lower() for name in ("format", "checkpoint_format") if raw.get(name)}
    for name, version in versions.items():
        check_choice(f"{where}: {name}", version, ("gptq", "gptq_v2"))
    if len(set(versions.values())) > 1:
        raise ValueError(
            f"{where}: format={raw['format']!r}: contradicts checkpoint_format={raw['checkpoint_format']!r}"
        )
    read_zeros = zeros if "gptq_v2" in versions.values() else zeros_less_one
    group = check_choice(f"{where}: group_size", raw.get("group_size"), GROUP_SIZES)
    has_order = check_choice(f"{where}: desc_act", raw.get("desc_act", False), (False, True)) and group != -1
    tensors = (
        ("qweight", "words", codes_of_inputs),
        ("qzeros", "zeros", read_zeros),
        ("scales", "scales", torch.t),
        ("g_idx", "group_ids" if has_order else "contiguous", torch.clone),
    )
    scheme = PackedScheme("int4", None if group == -1 else group, tensors)
    # rules of GPTQModel for modules: "-:" and a regular expression skips modules, "+:" quantizes them in another way
    rules = raw.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise ValueError(f"{where}: dynamic={rules!r:.80}: must be an object")
    if other := [rule for rule, settings in rules.items() if settings and not rule.startswith("-:")]:
        problem = "gives modules another format, which is not supported"
        raise ValueError(f"{where}: dynamic: {other[0]!r}: {rules[other[0]]!r:.80}: {problem}")
    skipped = [f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")]
    ignore = read_patterns(f"{where}: dynamic", skipped)
    ignore += read_patterns(f"{where}: modules_to_not_convert", raw.get("modules_to_not_convert"))
    blocks = raw.get("modules_in_block_to_quantize") or ()
    targets = tuple(name for block in blocks for name in ([block] if isinstance(block, str) else block)) or (ALL,)
    # AutoGPTQ stored a bias of 0 for each layer without a bias, and group ids as int64
    optional = () if has_order else (".g_idx",)
    return QuantConfig("gptq", ((targets, scheme),), ignore, ("I32", "I64"), optional=optional, zero=(".bias",))


def codes_of_inputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [K / 8, N] to codes [N, K]."""
    return nibbles(packed.t())


def zeros(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [groups, N / 8] to zero points [N, groups]."""
    return nibbles(packed).t()


def zeros_less_one(packed: torch.Tensor) -> torch.Tensor:
    return (zeros(packed) + 1) & 15

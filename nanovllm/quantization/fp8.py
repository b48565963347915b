"""FP8 (e4m3): Qwen3's published checkpoints, whose blocks of 128 x 128 share a scale, and `quantization="fp8"`."""

from pathlib import Path

import torch

from nanovllm.quantization.plan import ALL, Plan
from nanovllm.quantization.scaled import Scaling
from nanovllm.utils.checks import check_choice

MAX_E4M3 = 448.0


def e4m3_scaling(rows: int | None, columns: int | None, scale_name: str | None = None) -> Scaling:
    return Scaling(torch.float8_e4m3fn, MAX_E4M3, rows, columns, scale_name)


def plan_on_load() -> Plan:
    """A scale for each output: it is a factor of the product's result, and the same on any number of ranks."""
    return Plan("fp8", (((ALL,), e4m3_scaling(1, None)),))


def read_config(raw: dict, file: Path) -> Plan:
    where = f"{file}: quantization_config"
    check_choice(f"{where}: activation_scheme", raw.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    check_choice(f"{where}: fmt", raw.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
    check_choice(f"{where}: scale_fmt", raw.get("scale_fmt") or "float", ("float",))
    block = raw.get("weight_block_size")
    if block is None:  # a scale for a whole weight
        scaling = e4m3_scaling(None, None, "weight_scale")
    elif isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        scaling = e4m3_scaling(*block, "weight_scale_inv")
    else:
        raise ValueError(f"{where}: weight_block_size={block!r}: must be two positive integers")
    ignore = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or ()
    return Plan("fp8", (((ALL,), scaling),), tuple(ignore), ("F8_E4M3",))

"""Implements FP8 (e4m3) for checkpoints and for the setting `quantization="fp8"`.

In Qwen3's FP8 checkpoints, for example, each 128 x 128 block has a scale.
"""

from pathlib import Path
from typing import Any

import torch

from nanovllm.quantization.quant_config import ALL, QuantConfig, check_unread, read_patterns
from nanovllm.quantization.scaled import QuantScheme
from nanovllm.utils.checks import check_choice

MAX_E4M3 = 448.0
# fixed scales of activations and of the KV cache, both of which stay unquantized
UNUSED = ".input_scale", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale"


def e4m3_scheme(rows: int | None, columns: int | None, scale_name: str | None = None) -> QuantScheme:
    return QuantScheme(torch.float8_e4m3fn, MAX_E4M3, rows, columns, scale_name)


def config_on_load() -> QuantConfig:
    """Return the QuantConfig for weights with one scale per output.

    A scale per output can be applied to the matmul's result, and does not depend on the number of ranks.
    """
    return QuantConfig("fp8", (((ALL,), e4m3_scheme(1, None)),))


def check_block(name: str, block: Any) -> list[int]:
    """Return `block`, which must be the numbers of rows and columns of a block of weights."""
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block
    raise ValueError(f"{name}={block!r:.80}: must be two positive integers")


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    check_unread(where, raw, {"modules_to_convert": (), "expert_dtype": ("fp8",)})
    check_choice(f"{where}: activation_scheme", raw.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    check_choice(f"{where}: fmt", raw.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
    check_choice(f"{where}: scale_fmt", raw.get("scale_fmt") or "float", ("float",))
    block = raw.get("weight_block_size")
    if block is None:  # a scale for a whole weight
        scheme = e4m3_scheme(None, None, "weight_scale")
    else:
        scheme = e4m3_scheme(*check_block(f"{where}: weight_block_size", block), "weight_scale_inv")
    name = "modules_to_not_convert" if raw.get("modules_to_not_convert") else "ignored_layers"
    ignore = read_patterns(f"{where}: {name}", raw.get(name))
    return QuantConfig("fp8", (((ALL,), scheme),), ignore, ("F8_E4M3",), UNUSED)

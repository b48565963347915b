"""Reads the format compressed-tensors: FP8 weights with a scale per output, per block or per weight matrix."""

from pathlib import Path

from nanovllm.quantization.formats.fp8 import e4m3_scheme
from nanovllm.quantization.quant_config import QuantConfig
from nanovllm.quantization.scaled import QuantScheme
from nanovllm.utils.checks import check_choice

SCALE_NAME = "weight_scale"


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    check_choice(f"{where}: format", raw.get("format"), ("float-quantized", "naive-quantized"))
    check_choice(f"{where}: quantization_status", raw.get("quantization_status", "compressed"), ("compressed",))
    if raw.get("kv_cache_scheme") is not None:
        raise ValueError(f"{where}: kv_cache_scheme is not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where}: has no config_groups")
    read = tuple(
        (tuple(group.get("targets") or ()), _read_scheme(group.get("weights") or {}, f"{where}: {name}: weights"))
        for name, group in groups.items()
    )
    return QuantConfig("compressed-tensors", read, tuple(raw.get("ignore") or ()), ("F8_E4M3",))


def _read_scheme(weights: dict, where: str) -> QuantScheme:
    check_choice(f"{where}: type", weights.get("type"), ("float",))
    check_choice(f"{where}: num_bits", weights.get("num_bits"), (8,))
    check_choice(f"{where}: symmetric", weights.get("symmetric", True), (True,))
    check_choice(f"{where}: dynamic", weights.get("dynamic", False), (False,))
    strategy = weights.get("strategy")
    check_choice(f"{where}: strategy", strategy, ("tensor", "channel", "block"))
    if strategy == "block":
        return e4m3_scheme(*weights["block_structure"], SCALE_NAME)
    return e4m3_scheme(1 if strategy == "channel" else None, None, SCALE_NAME)

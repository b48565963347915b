"""The `quantization_config` of compressed-tensors: FP8 weights with a scale for each output, block or whole weight."""

from pathlib import Path

from nanovllm.quantization.fp8 import e4m3_scaling
from nanovllm.quantization.plan import Plan
from nanovllm.quantization.scaled import Scaling
from nanovllm.utils.checks import check_choice

SCALE_NAME = "weight_scale"


def read_config(raw: dict, file: Path) -> Plan:
    where = f"{file}: quantization_config"
    check_choice(f"{where}: format", raw.get("format"), ("float-quantized", "naive-quantized"))
    check_choice(f"{where}: quantization_status", raw.get("quantization_status", "compressed"), ("compressed",))
    if raw.get("kv_cache_scheme") is not None:
        raise ValueError(f"{where}: kv_cache_scheme is not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where}: has no config_groups")
    read = tuple(
        (tuple(group.get("targets") or ()), _read_scaling(group.get("weights") or {}, f"{where}: {name}: weights"))
        for name, group in groups.items()
    )
    return Plan("compressed-tensors", read, tuple(raw.get("ignore") or ()), ("F8_E4M3",))


def _read_scaling(weights: dict, where: str) -> Scaling:
    check_choice(f"{where}: type", weights.get("type"), ("float",))
    check_choice(f"{where}: num_bits", weights.get("num_bits"), (8,))
    check_choice(f"{where}: symmetric", weights.get("symmetric", True), (True,))
    check_choice(f"{where}: dynamic", weights.get("dynamic", False), (False,))
    strategy = weights.get("strategy")
    check_choice(f"{where}: strategy", strategy, ("tensor", "channel", "block"))
    if strategy == "block":
        return e4m3_scaling(*weights["block_structure"], SCALE_NAME)
    return e4m3_scaling(1 if strategy == "channel" else None, None, SCALE_NAME)

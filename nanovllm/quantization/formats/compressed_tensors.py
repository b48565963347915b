"""Reads the format compressed-tensors.

Weights have 8 bits or 4 bits. FP8 weights have one scale for each output, for each block, or for the whole matrix. The
formats of 4-bit weights are integers, MXFP4 and NVFP4.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from nanovllm.quantization.formats.awq import GROUP_SIZES
from nanovllm.quantization.formats.fp8 import UNUSED, check_block, e4m3_scheme
from nanovllm.quantization.formats.modelopt import E4M3
from nanovllm.quantization.formats.mxfp4 import E8M0, e8m0
from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import QuantConfig, check_unread, read_patterns
from nanovllm.quantization.scaled import QuantScheme
from nanovllm.utils.checks import check_choice

SCALE_NAME = "weight_scale"
# With True, "group" and "dynamic", groups are not contiguous: inputs were grouped in the order of their importance.
# With "weight" and "static", this order was only the order of rounding.
CONTIGUOUS = None, "weight", "static"
ORDERS = *CONTIGUOUS, True, "group", "dynamic"


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    read, dtypes = form = FORMATS[check_choice(f"{where}: format", raw.get("format"), FORMATS)]
    same = [name for name in FORMATS if FORMATS[name] == form]  # names of the same format
    check_unread(where, raw, {"transform_config": ({"config_groups": {}},)})
    check_unread(f"{where}: sparsity_config", raw.get("sparsity_config") or {}, {"format": ("dense",)})
    check_choice(
        f"{where}: quantization_status", raw.get("quantization_status", "compressed"), ("compressed", "frozen")
    )
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where}: has no config_groups")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, dict):  # the schema also allows a list of targets, of a scheme with this name
            raise ValueError(f"{where}: config_groups: {name}={group!r:.80}: must be an object")
        place, weights = f"{where}: {name}", group.get("weights") or {}
        if not isinstance(weights, dict):
            raise ValueError(f"{place}: weights={weights!r:.80}: must be an object")
        check_choice(f"{place}: weights: dynamic", weights.get("dynamic", False), (False,))
        check_unread(place, group, {"output_activations": (), "format": same})
        if activations := group.get("input_activations"):
            # the format may quantize activations to 4 bits, but here they stay in 16 bits
            bits = 8 if dtypes == FP8_DTYPES else 4
            check_choice(f"{place}: input_activations: num_bits", activations.get("num_bits", 8), (bits,))
        targets = read_patterns(f"{place}: targets", group.get("targets"))
        schemes.append((targets, read(weights, f"{place}: weights")))
    unused = (*UNUSED, ".weight_shape")
    ignore = read_patterns(f"{where}: ignore", raw.get("ignore"))
    return QuantConfig("compressed-tensors", tuple(schemes), ignore, dtypes, unused)


def _read_fp8(weights: dict, where: str) -> QuantScheme:
    check_choice(f"{where}: type", weights.get("type"), ("float",))
    check_choice(f"{where}: num_bits", weights.get("num_bits"), (8,))
    check_choice(f"{where}: symmetric", weights.get("symmetric", True), (True,))
    strategy = weights.get("strategy")
    check_choice(f"{where}: strategy", strategy, ("tensor", "channel", "block"))
    if strategy == "block":
        return e4m3_scheme(*check_block(f"{where}: block_structure", weights.get("block_structure")), SCALE_NAME)
    return e4m3_scheme(1 if strategy == "channel" else None, None, SCALE_NAME)


def _read_int4(weights: dict, where: str) -> PackedScheme:
    check_choice(f"{where}: type", weights.get("type"), ("int",))
    check_choice(f"{where}: num_bits", weights.get("num_bits"), (4,))
    check_choice(f"{where}: strategy", weights.get("strategy"), ("group", "channel"))
    size = check_choice(f"{where}: group_size", weights.get("group_size") or -1, GROUP_SIZES)
    order = check_choice(f"{where}: actorder", weights.get("actorder") or None, ORDERS)
    tensors = [("weight_packed", "words", nibbles), (SCALE_NAME, "scales", torch.clone)]
    if not weights.get("symmetric", True):
        tensors.append(("weight_zero_point", "zeros", zeros))
    if order not in CONTIGUOUS:
        tensors.append(("weight_g_idx", "group_ids", torch.clone))
    return PackedScheme("int4", None if size == -1 else size, tuple(tensors))


def _read_fp4(group_size: int, *tensors: tuple[str, str, Callable], scale_dtype: torch.dtype) -> Callable:
    def read(weights: dict, where: str) -> PackedScheme:
        check_choice(f"{where}: type", weights.get("type"), ("float",))
        check_choice(f"{where}: num_bits", weights.get("num_bits"), (4,))
        check_choice(f"{where}: symmetric", weights.get("symmetric", True), (True,))
        check_choice(f"{where}: group_size", weights.get("group_size"), (group_size,))
        check_choice(f"{where}: strategy", weights.get("strategy") or "group", ("group", "tensor_group"))
        check_choice(f"{where}: actorder", weights.get("actorder") or None, CONTIGUOUS)
        return PackedScheme("e2m1", group_size, (("weight_packed", "words", nibbles), *tensors), scale_dtype)

    return read


def zeros(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [N / 8, groups] to zero points [N, groups]."""
    return nibbles(packed.t()).t()


FP8_DTYPES = ("F8_E4M3",)
# format -> (function that reads the scheme of a weight, dtypes of the weight's tensors)
FORMATS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "float-quantized": (_read_fp8, FP8_DTYPES),
    "naive-quantized": (_read_fp8, FP8_DTYPES),
    "pack-quantized": (_read_int4, ("I32", "I64")),
    "mxfp4-pack-quantized": (
        _read_fp4(32, (SCALE_NAME, "scales", e8m0), scale_dtype=E8M0),
        ("U8",),
    ),
    "nvfp4-pack-quantized": (
        _read_fp4(
            *(16, (SCALE_NAME, "scales", torch.clone), ("weight_global_scale", "row_scales", torch.reciprocal)),
            scale_dtype=E4M3,
        ),
        ("U8", "F8_E4M3"),
    ),
}

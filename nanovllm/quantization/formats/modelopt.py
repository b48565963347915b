"""Reads the formats NVFP4 and FP8 of NVIDIA Model Optimizer.

NVFP4 has e2m1 values, an e4m3 scale for each group of 16 inputs, and a global scale. Activations stay in the model's
dtype. FP8 has a scale for each weight matrix.
"""

import fnmatch
from pathlib import Path

import torch

from nanovllm.quantization.formats.fp8 import UNUSED, e4m3_scheme
from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import ALL, QuantConfig, check_unread, read_patterns
from nanovllm.utils.checks import check_choice, check_object, read_json

E4M3 = torch.float8_e4m3fn
# of other algorithms: tensors that change the inputs of a layer or add to its outputs, and layers of several formats
UNREAD = {"has_zero_point": (), "pre_quant_scale": (), "lora_rank": (), "quantized_layers": ()}


def read_file(file: Path) -> QuantConfig | None:
    """Read a file `hf_quant_config.json`. Return None if the file has no `quant_algo`."""
    check_object(f"{file}: quantization", raw := read_json(file).get("quantization"))
    return None if raw.get("quant_algo") is None else _read(raw, f"{file}: quantization")


def read_config(raw: dict, file: Path) -> QuantConfig:
    return _read(raw, f"{file}: quantization_config")


def _read(raw: dict, where: str) -> QuantConfig:
    """Read a JSON object that describes how the weights are quantized. Error messages begin with `where`."""
    check_choice(f"{where}: quant_algo", algorithm := raw.get("quant_algo"), ("NVFP4", "FP8"))
    check_unread(where, raw, UNREAD)
    bits, sizes = (8, (None,)) if algorithm == "FP8" else (4, (None, 16))
    check_choice(f"{where}: group_size", raw.get("group_size") or None, sizes)
    for name, group in (raw.get("config_groups") or {}).items():  # what the algorithm says, in other words
        place, weights = f"{where}: {name}", group.get("weights") or {}
        check_unread(place, group, UNREAD | {"output_activations": ()})
        check_choice(f"{place}: weights: num_bits", weights.get("num_bits", bits), (bits,))
        check_choice(f"{place}: weights: type", weights.get("type", "float"), ("float",))
        check_choice(f"{place}: weights: group_size", weights.get("group_size"), sizes)
        activations = group.get("input_activations") or {}
        check_choice(f"{place}: input_activations: num_bits", activations.get("num_bits", bits), (bits,))
    name = "ignore" if raw.get("ignore") else "exclude_modules"
    names = read_patterns(f"{where}: {name}", raw.get(name))  # with wildcards as in file names
    ignore = tuple(f"re:{fnmatch.translate(name)}" if "*" in name else name for name in names)
    if algorithm == "FP8":
        scheme = e4m3_scheme(None, None, "weight_scale")
        return QuantConfig("modelopt", (((ALL,), scheme),), ignore, ("F8_E4M3",), UNUSED)
    tensors = (
        ("weight", "words", nibbles),
        ("weight_scale", "scales", torch.clone),
        ("weight_scale_2", "row_scales", torch.clone),
    )
    scheme = PackedScheme("e2m1", 16, tensors, E4M3)
    return QuantConfig("modelopt", (((ALL,), scheme),), ignore, ("U8", "F8_E4M3"), UNUSED)

"""The formats of 8-bit weights. A format's module is imported when it is used. README.md in this folder tells more.

`fp8_cache.py` is the format of an 8-bit cache, which `layers/attention.py` chooses.

A module of CHECKPOINTS has `read_config(raw, file)`, which makes a `QuantConfig` of the `quantization_config` in a
config.json, or raises a ValueError that names `file`. A module of ON_LOAD has `config_on_load()`, which returns the
QuantConfig of a checkpoint that is quantized while it is loaded.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

# `quant_method` of a checkpoint's quantization_config -> module
CHECKPOINTS = {
    "fp8": "nanovllm.quantization.fp8",
    "compressed-tensors": "nanovllm.quantization.compressed_tensors",
}
# the setting `quantization` -> module
ON_LOAD = {
    "fp8": "nanovllm.quantization.fp8",
    "int8": "nanovllm.quantization.int8",
}


def find_quantization(raw: dict | None, file: Path, setting: str | None) -> Any:
    """The QuantConfig for a config.json's `quantization_config` and the setting `quantization`; None without both.

    ValueError for a format that is not supported, and for a setting that differs from the checkpoint's.
    """
    if not raw:
        if setting is not None:
            _check("quantization", setting, ON_LOAD)
        return import_module(ON_LOAD[setting]).config_on_load() if setting else None
    _check(f"{file}: quantization_config: quant_method", raw.get("quant_method"), CHECKPOINTS)
    config = import_module(CHECKPOINTS[raw["quant_method"]]).read_config(raw, file)
    if setting not in (None, config.name):
        raise ValueError(f"quantization={setting!r}: must be {config.name!r}, the checkpoint's, or left out")
    return config


def _check(name: str, value: Any, known: dict) -> None:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(
            f"{name}={value!r}: must be one of {names}; nanovllm/quantization/__init__.py is where another is added"
        )

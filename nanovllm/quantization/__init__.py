"""The formats of 8-bit weights. docs/8-bit.md tells more.

`fp8_cache.py` is the format of an 8-bit cache, which `layers/attention.py` chooses.

A format is a module of `formats/`. With `read_config(raw, file)`, it makes a `QuantConfig` of the `quantization_config`
in a config.json whose `quant_method` has the module's name, or raises a ValueError that names `file`. With
`config_on_load()`, it returns the QuantConfig of a checkpoint that is quantized while it is loaded, for the setting
`quantization` of that name.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any


def find_quantization(raw: dict | None, file: Path, setting: str | None) -> Any:
    """The QuantConfig for a config.json's `quantization_config` and the setting `quantization`; None without both.

    ValueError for a format that is not supported, and for a setting that differs from the checkpoint's.
    """
    if not raw:
        return None if setting is None else _format("quantization", setting, "config_on_load")()
    name = f"{file}: quantization_config: quant_method"
    config = _format(name, raw.get("quant_method"), "read_config")(raw, file)
    if setting not in (None, config.name):
        raise ValueError(f"quantization={setting!r}: must be {config.name!r}, the checkpoint's, or left out")
    return config


def _format(name: str, value: Any, maker: str) -> Callable:
    """The function `maker` of the format `value`. ValueError, which starts with `name`, if no format has both."""
    names = [module.name for module in iter_modules([f"{path}/formats" for path in __path__])]
    modules = {name.replace("_", "-"): import_module(f"{__name__}.formats.{name}") for name in names}
    known = {name: getattr(module, maker) for name, module in modules.items() if hasattr(module, maker)}
    if not isinstance(value, str) or value not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(
            f"{name}={value!r}: must be one of {choices}; another format is a file of nanovllm/quantization/formats/"
        )
    return known[value]

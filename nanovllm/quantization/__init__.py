"""Defines the formats of 8-bit and 4-bit weights, and of an 8-bit cache (`fp8_cache.py`).

See nanovllm/docs/quantization.md.

Each module in `formats/` defines one format. The format's name is the module's name with dashes instead of underscores.
The module of a format has one or both of the functions `read_config` and `config_on_load`:

- `read_config(raw, file)` is called if a checkpoint's `quant_method` is the format's name. `read_config` turns `raw`,
  the `quantization_config` of a config.json, into a QuantConfig. If `raw` describes an unsupported format,
  `read_config` raises a ValueError that names `file`.
- `config_on_load()` is called if the setting `quantization` is the format's name. `config_on_load` returns the
  QuantConfig for weights that the loader quantizes.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any


def find_quantization(raw: dict | None, file: Path, setting: str | None) -> Any:
    """Return the QuantConfig for `raw` and `setting`.

    `raw` is `quantization_config` in config.json, and `setting` is the setting `quantization`. NVIDIA Model Optimizer
    may describe the format in another file next to config.json. Return None if no file describes a format and `setting`
    is None. Raise ValueError or TypeError if the format is not supported, or if the setting differs from the
    checkpoint's format.
    """
    config = None
    if raw:
        name = f"{file}: quantization_config: quant_method"
        config = _format(name, raw.get("quant_method"), "read_config")(raw, file)
    elif (separate := file.with_name("hf_quant_config.json")).exists():
        config = _format(str(separate), "modelopt", "read_file")(separate)
    if config is None:
        return None if setting is None else _format("quantization", setting, "config_on_load")()
    if setting not in (None, config.name):
        raise ValueError(f"quantization={setting!r}: must be {config.name!r}, the checkpoint's, or left out")
    return config


def _format(name: str, value: Any, maker: str) -> Callable:
    """Return a function of the module that defines the format `value`. `maker` is the function's name."""
    names = [module.name for module in iter_modules([f"{path}/formats" for path in __path__])]
    modules = {name.replace("_", "-"): import_module(f"{__name__}.formats.{name}") for name in names}
    known = {name: getattr(module, maker) for name, module in modules.items() if hasattr(module, maker)}
    if not isinstance(value, str) or value not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(
            f"{name}={value!r}: must be one of {choices}; to add a format, add a file to nanovllm/quantization/formats/"
        )
    return known[value]

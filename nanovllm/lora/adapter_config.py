"""Reads the adapter_config.json of a PEFT folder, which determines the adapter's modules, ranks and scales."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import check_bool, check_int, check_object, check_real, read_json

CONFIG_FILE = "adapter_config.json"
# entries for features that this engine lacks, each with the values that turn the feature off
REFUSED: dict[str, tuple] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
    "alora_invocation_tokens": ([], None),
    "fan_in_fan_out": (False, None),
    "megatron_config": ({}, None),
    "arrow_config": ({}, None),
    "kasa_config": ({}, None),
    "monteclora_config": ({}, None),
}
# ways of initialization that change the base model's weights
CHANGES_BASE = "pissa", "olora", "corda", "loftq", "lora_ga"
LAYER = r".*\.{}\.(\d+)\."  # where PEFT looks for a pattern of layers_pattern, and then for the layer's number
END_OF_NAME = r"(.*\.)?({})$"  # where PEFT matches a pattern of rank_pattern or alpha_pattern


@dataclass(frozen=True)
class AdapterConfig:
    """Contains the entries of an adapter_config.json that determine the adapter's modules, ranks and scales."""

    file: Path
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]  # stacked parameters of experts
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...] | None  # only modules in these layers have an adapter; None: in all layers
    layers_pattern: tuple[str, ...]  # names of a module list whose indices are layers; empty: the last module list

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read the adapter_config.json in `folder`.

        Raises FileNotFoundError if the file does not exist. Raises ValueError or TypeError if an entry is invalid or
        not supported. Error messages name the file and the entry.
        """
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder}: the folder holds no {CONFIG_FILE}, which PEFT saves with an adapter")
        raw = read_json(file)
        if (kind := raw.get("peft_type", "LORA")) != "LORA":
            raise ValueError(f"{file}: peft_type={kind!r:.80}: must be 'LORA'")
        for name, accepted in REFUSED.items():
            if (value := raw.get(name)) not in accepted:
                raise ValueError(f"{file}: {name}={value!r:.80}: is not supported; it must be {accepted[0]!r}")
        if str(start := raw.get("init_lora_weights")).startswith(CHANGES_BASE):
            raise ValueError(
                f"{file}: init_lora_weights={start!r:.80}: is not supported, because it changes the base model too; "
                "PEFT can convert the adapter when it saves it (path_initial_model_for_weight_conversion)"
            )
        parameters = _patterns(file, "target_parameters", raw.get("target_parameters") or [])
        if isinstance(parameters, str):
            raise TypeError(f"{file}: target_parameters={parameters!r:.80}: must be a list of names")
        if raw.get("target_modules") is None and not parameters:
            raise ValueError(f"{file}: has neither target_modules nor target_parameters")
        return cls(
            file,
            rank=check_int(f"{file}: r", raw.get("r", 8), low=1),
            alpha=check_real(f"{file}: lora_alpha", raw.get("lora_alpha", 8), low=0),
            use_rslora=check_bool(f"{file}: use_rslora", raw.get("use_rslora") or False),
            target_modules=_patterns(file, "target_modules", raw.get("target_modules") or []),
            exclude_modules=_patterns(file, "exclude_modules", raw.get("exclude_modules") or []),
            target_parameters=parameters,
            rank_pattern=_numbers(file, "rank_pattern", raw.get("rank_pattern"), check_int, 1),
            alpha_pattern=_numbers(file, "alpha_pattern", raw.get("alpha_pattern"), check_real, 0),
            layers=_layers(file, raw.get("layers_to_transform")),
            layers_pattern=_names(file, "layers_pattern", raw.get("layers_pattern") or []),
        )

    def includes(self, module: str) -> bool:
        """Return whether the module with this name has an adapter."""
        if self.target_modules == "all-linear":
            return not matches(self.exclude_modules, module)
        found = matches(self.target_modules, module) and not matches(self.exclude_modules, module)
        return found and (self.layers is None or self._layer_of(module) in self.layers)

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_pattern or (r"[^.]*",):
            if found := re.match(LAYER.format(pattern), module):
                return int(found[1])
        return None

    def includes_parameter(self, name: str) -> bool:
        """Return whether the stacked parameter with this name has an adapter."""
        return matches(self.target_parameters, name)

    def rank_of(self, module: str) -> int:
        return _find(self.rank_pattern, module, self.rank)

    def rank_within(self, module: str, setting: str, bound: int) -> int:
        """Return `rank_of(module)`. Raises ValueError if the rank is larger than the engine's setting."""
        if (rank := self.rank_of(module)) > bound:
            raise ValueError(f"{self.file}: the adapter of {module} has rank {rank}: must be at most {setting}={bound}")
        return rank

    def scale_of(self, module: str) -> float:
        """Return the factor by which B A is multiplied: alpha / rank, or alpha / sqrt(rank) if `use_rslora`
        (arXiv:2312.03732).
        """
        rank = self.rank_of(module)
        return _find(self.alpha_pattern, module, self.alpha) / (sqrt(rank) if self.use_rslora else rank)


def matches(patterns: str | tuple[str, ...], module: str) -> bool:
    """Return whether PEFT would match `module` with `patterns`.

    `patterns` is a regular expression for the whole name, or a tuple of name endings.
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _find(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of the module's name, as in PEFT."""
    found = (value for pattern, value in patterns.items() if re.match(END_OF_NAME.format(pattern), module))
    return next(found, default)


def _patterns(file: Path, name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        _check_pattern(file, name, value)
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{file}: {name}={value!r:.80}: must be a regular expression or a list of module names")
    return tuple(value)


def _names(file: Path, name: str, value: Any) -> tuple[str, ...]:
    patterns = _patterns(file, name, value)
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    for pattern in patterns:
        _check_pattern(file, name, pattern, LAYER)
    return patterns


def _layers(file: Path, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = value if isinstance(value, list) else [value]
    return tuple(check_int(f"{file}: layers_to_transform", number, low=0) for number in numbers)


def _numbers(file: Path, name: str, value: Any, check: Any, low: int) -> dict[str, Any]:
    check_object(f"{file}: {name}", value or {})
    for pattern in value or {}:
        _check_pattern(file, name, pattern, END_OF_NAME)
    return {
        pattern: check(f"{file}: {name}: {pattern!r:.80}", number, low=low) for pattern, number in (value or {}).items()
    }


def _check_pattern(file: Path, name: str, pattern: str, form: str = "{}") -> None:
    try:
        re.compile(form.format(pattern))
    except (re.error, RecursionError) as error:
        raise ValueError(f"{file}: {name}: {pattern!r:.80}: is not a regular expression ({error})") from None

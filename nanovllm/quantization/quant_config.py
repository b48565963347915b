"""Finds the quantization scheme of each layer by the layer's name in the checkpoint."""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.fused import find_form
from nanovllm.fused.fused_linear import MultipliesByFormat
from nanovllm.kernels import ops_for
from nanovllm.kernels.launch.gpu_features import has_fp8_units
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.moe.experts import Experts, ExpertsFormat, Router
from nanovllm.quantization.packed import PackedScheme
from nanovllm.quantization.packed_linear import PackedExperts, PackedLinear
from nanovllm.quantization.scaled import QuantScheme
from nanovllm.quantization.scaled_experts import FP8Experts, ScaledExperts
from nanovllm.quantization.scaled_linear import ScaledLinear
from nanovllm.utils.loader import parameter, stored_modules
from nanovllm.utils.nested_names import nested_names
from nanovllm.utils.replace import replace_methods

logger = logging.getLogger("nanovllm")
ALL = "Linear"  # a pattern for every linear layer
Scheme = QuantScheme | PackedScheme  # all layers of a model have the same kind


@dataclass(frozen=True)
class QuantConfig:
    """Says how each linear layer of a model is quantized.

    groups: pairs (name patterns, quantization scheme). A layer gets the scheme of the first pair with a pattern that
        matches the layer's name. If there is no such pair, the layer gets the scheme of the first pair with "Linear".
    ignore: name patterns of layers that are not quantized.

    A pattern can be the name of a module in the checkpoint, the end of this name, or the name of a parent module. If a
    pattern begins with "re:", the rest is a regular expression, which must match the beginning of the name. Embeddings,
    the output head and routers are never quantized.
    """

    name: str  # the format's name in the setting `quantization`
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # of the checkpoint's tensors, as safetensors names them
    # fixed scales of activations: scaling each row by its largest value instead is at least as accurate
    unused_tensors: tuple[str, ...] = (".input_scale", ".activation_scale")
    optional: tuple[str, ...] = ()  # ends of the names of tensors that a checkpoint may lack
    zero: tuple[str, ...] = ()  # ends of the names of tensors that the model lacks, and that must be zero

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the quantized values, which is the same in all groups."""
        return self.groups[0][1].dtype

    @property
    def bits(self) -> int:
        return self.groups[0][1].bits

    @property
    def quantizes(self) -> bool:
        """Return whether the loader can quantize unquantized weights."""
        return all(scheme.quantizes for _, scheme in self.groups)

    def own_name(self, name: str) -> str:
        """Return a tensor's name in the model. `name` is the tensor's name in the checkpoint.

        Some checkpoints use the name of block scales, `weight_scale_inv`, for the single scale of a weight.
        """
        has_one_scale = self.groups[0][1].scale_name == "weight_scale"
        return name.removesuffix("_inv") if has_one_scale and name.endswith(".weight_scale_inv") else name

    def adapt(self, loaders: dict[str, tuple[Callable, list]], stored: Collection[str]) -> None:
        """Remove from `loaders` the `optional` tensors that are not stored, and add checks of `zero` tensors.

        loaders: the result of `weight_loaders`.
        stored: the names of the checkpoint's tensors.
        """
        for name in [name for name in loaders if name.endswith(self.optional) and name not in stored]:
            del loaders[name]
        loaders |= {name: (check_zero, []) for name in stored if name.endswith(self.zero) and name not in loaders}

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module, or None. `module` is the module's name in the checkpoint."""
        names = nested_names(module)
        if any(_matches(pattern, name) for pattern in self.ignore for name in names):
            return None
        by_name = (s for targets, s in self.groups if any(_matches(p, n) for p in targets if p != ALL for n in names))
        by_class = (s for targets, s in self.groups if ALL in targets)
        return next(by_name, None) or next(by_class, None)

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Set the formats of linear layers and mixtures of experts in `model`.

        Allocate the weights of these layers on `device`.
        """
        if device.type == "cpu":
            logger.warning(
                "quantization: on a CPU, %s weights are slower than 16 bits: each step dequantizes them", self.name
            )
        is_packed = isinstance(self.groups[0][1], PackedScheme)
        make_linear: Callable = PackedLinear if is_packed else ScaledLinear
        make_experts: Callable = PackedExperts if is_packed else ScaledExperts
        has_units = "quantize_rows" in ops_for(device) and has_fp8_units(device)
        if quantizes_rows := has_units and self.dtype == torch.float8_e4m3fn:
            from nanovllm.quantization.fp8_linear import FP8Linear  # imported lazily, because it needs Triton

            make_linear, make_experts = FP8Linear, FP8Experts
        for path, module in model.named_modules():
            if isinstance(module, Experts):
                names = [f"{path}.{name.rsplit('.', 1)[0]}" for name in module.tensors_of_experts()]
                self._prepare(path, module, names, make_experts, model.config.dtype, device)
            elif isinstance(module, LinearBase):
                names = (
                    [] if isinstance(module, Router) else [*stored_modules(path, module, model.packed_modules_mapping)]
                )
                self._prepare(path, module, names, make_linear, model.config.dtype, device)
        for path, module in model.named_modules():
            if getattr(module, "num_shared", 0):
                parts = module.shared_expert.gate_up_proj, module.shared_expert.down_proj
                if {hasattr(part, "format") for part in parts} != {type(module.experts.format) is not ExpertsFormat}:
                    raise ValueError(f"{path}: its shared expert and its other experts are quantized in different ways")
                module.stack_shared_expert()
        for module in model.modules() if quantizes_rows else ():
            consumer = getattr(getattr(module, "down_proj", None), "format", None)
            is_mlp = find_form(module) == "decoder:FusedMLP"  # another module may need unquantized results
            if is_mlp and isinstance(consumer, FP8Linear) and type(module.act_fn) is SiluAndMul:
                module.act_fn = consumer.act_fn()

    def _prepare(
        self, path: str, module: Any, names: list[str], make: Callable, dtype: torch.dtype, device: torch.device
    ) -> None:
        schemes = {self.scheme_of(name) for name in names} or {None}
        if len(schemes) > 1:
            raise ValueError(f"{path}: its parts {', '.join(names[:3])}, ... are quantized in different ways")
        with torch.device(device):
            if (scheme := schemes.pop()) is not None:
                if isinstance(module, LinearBase) and type(module).multiply is not LinearBase.multiply:
                    raise ValueError(f"{path}: can't be quantized: {type(module).__name__} has a `multiply` of its own")
                try:
                    module.format = make(module, scheme)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from error
                if isinstance(module, LinearBase):
                    replace_methods(module, MultipliesByFormat, "Quantized")
            for name, p in [*module.named_parameters(recurse=False)]:
                if p.is_meta:  # a bias, or a weight that is not quantized
                    setattr(module, name, parameter(tuple(p.shape), p.weight_loader, dtype))


def check_zero(tensor: Any) -> None:
    """Raise ValueError if a tensor that the model lacks is not zero. `adapt` uses this function as a weight loader."""
    if tensor[...].any():
        raise ValueError("is not zero, and the model has no such parameter")


def check_unread(where: str, raw: dict, neutral: Mapping[str, Collection]) -> None:
    """Raise ValueError if an entry of `raw` changes the meaning of the checkpoint, but the library does not read it.

    neutral: maps the name of each unread entry to the values that change nothing. Empty values and False are always
        accepted.
    """
    for name, values in neutral.items():
        if (value := raw.get(name)) and value not in values:
            raise ValueError(f"{where}: {name}={value!r:.80}: is not supported")


def read_patterns(where: str, names: Any) -> tuple[str, ...]:
    """Return the names in a list of config.json, which may be missing.

    Raises ValueError if an element is not a text, or not a valid regular expression.
    """
    if not isinstance(names, list | tuple | None) or not all(isinstance(name, str) for name in names or ()):
        raise ValueError(f"{where}={names!r:.80}: must be a list of names")
    for name in names or ():
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{where}: {name!r:.80}: must be a regular expression after 're:' ({error})") from None
    return tuple(names or ())


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{module}".endswith(f".{pattern}") or module.startswith(f"{pattern}.")

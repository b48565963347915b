"""Reads EAGLE-3 heads and MTP heads.

An EAGLE-3 head has the format of EAGLE's authors or of the library `speculators`. An MTP head is part of the model's
checkpoint.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from nanovllm.models import ModelConfig
from nanovllm.utils.checks import check_bool, check_choice, check_int, read_json
from nanovllm.utils.download import broken_file
from nanovllm.utils.loader import FLOAT_DTYPES, find_tensors, open_safetensors, stored_dtypes

VARIANTS = "fc_norm", "norm_before_fc", "norm_output"  # options of later heads with other connections between layers
DTYPES = (*FLOAT_DTYPES, "I64", "I32", "BOOL")  # integer tensors map the vocabularies


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head. The shape was checked against the target model."""

    layer: ModelConfig  # of the head's layer, with the vocabulary of the target model
    draft_vocab_size: int  # number of tokens that the head can draft
    target_hidden_size: int
    layer_ids: tuple[int, ...]  # the head reads the hidden states before these layers of the target model
    norm_before_residual: bool  # whether the residual is the normalized hidden states
    has_embeddings: bool  # if False, the head uses the embeddings of the target model


def read_eagle3_config(folder: Path, target: ModelConfig, dtype: torch.dtype, with_weights: bool) -> Eagle3Config:
    """Read the config of the EAGLE-3 head in `folder`. `target` is the config of the target model, and `dtype` is the
    engine's dtype.

    If the head is not supported or was made for another model, raise a ValueError or TypeError that names the file and
    the value.
    """
    file = folder / "config.json"
    raw = read_json(file)
    if "speculators_model_type" in raw:
        check_choice(f"{file}: speculators_model_type", raw["speculators_model_type"], ("eagle3",))
    layer_config = raw.get("transformer_layer_config")  # the format of speculators
    layer = ModelConfig.read(folder, raw=raw if layer_config is None else layer_config)
    if layer.quantization or layer.moe or layer.hybrid:
        raise ValueError(f"{file}: must describe a dense layer, not quantized")
    check_int(f"{file}: num_hidden_layers", layer.num_hidden_layers, 1, 1)
    for name in VARIANTS:
        if raw.get(name):
            raise ValueError(f"{file}: {name}={raw[name]!r}: is not supported")
    of_authors = raw.get("eagle_config") or {}
    check_choice(f"{file}: use_aux_hidden_state", of_authors.get("use_aux_hidden_state", True), (True,))
    target_hidden_size = raw.get("target_hidden_size") or layer.hidden_size
    names = ("vocab_size", layer.vocab_size), ("target_hidden_size", target_hidden_size)
    for (name, value), model_value in zip(names, (target.vocab_size, target.hidden_size)):
        if value != model_value:
            raise ValueError(f"{file}: {name}={value!r}: must be {model_value}, as in the model")
    draft_vocab_size = raw.get("draft_vocab_size") or layer.vocab_size
    has_embeddings = with_weights and "embed_tokens.weight" in read_tensors(folder)
    if layer.hidden_size != target.hidden_size and with_weights and not has_embeddings:
        raise ValueError(f"{file}: hidden_size={layer.hidden_size}: must be {target.hidden_size}, as in the model")
    return Eagle3Config(
        layer=replace(layer, dtype=dtype),
        draft_vocab_size=check_int(f"{file}: draft_vocab_size", draft_vocab_size, 1, layer.vocab_size),
        target_hidden_size=target.hidden_size,
        layer_ids=_layer_ids(file, raw, target.num_hidden_layers),
        norm_before_residual=check_bool(f"{file}: norm_before_residual", raw.get("norm_before_residual", False)),
        has_embeddings=has_embeddings or layer.hidden_size != target.hidden_size,
    )


def _layer_ids(file: Path, raw: dict, num_layers: int) -> tuple[int, ...]:
    """Return the ids of the layers whose inputs the head reads.

    An id in `eagle_config` refers to a layer's output, which is the input of the following layer.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    top_level, of_authors = raw.get(name), (raw.get("eagle_config") or {}).get(name)
    offset = int(top_level is None and of_authors is not None)
    ids = next((x for x in (top_level, of_authors) if x is not None), [2, num_layers // 2, num_layers - 3])
    layers = ids if isinstance(ids, list) else []
    layers = [check_int(f"{file}: {name}: a layer", i, 0, num_layers - 1 - offset) + offset for i in layers]
    if len(layers) != 3 or layers != sorted(layers):
        bound = f"must be three layers of the model's {num_layers}, in ascending order"
        raise ValueError(f"{file}: {name}={ids!r}: {bound}")
    return tuple(layers)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the head's tensors, memory-mapped, with the names that `models/shared/head_models.py` uses.

    In files, the head's layer is named `midlayer` or `layers.0`. Many heads are stored as `pytorch_model.bin`, which is
    unpickled with `weights_only=True`.
    """
    tensors: dict[str, torch.Tensor] = {}
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        try:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a broken file can raise anything
            raise broken_file(pickled, f"can't be read ({type(error).__name__}: {error})") from error
    else:
        for file in {*find_tensors(folder, DTYPES).values()}:
            with open_safetensors(file) as opened:
                tensors |= {name: opened.get_tensor(name) for name in stored_dtypes(file)}
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.", 1) for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


def check_mtp(folder: Path, target: ModelConfig, with_weights: bool) -> None:
    """Raise ValueError unless `folder` contains a supported MTP head for the model `target`."""
    if not target.hybrid:
        raise ValueError(f"method='mtp': models of the family {target.model_type!r} have no head")
    names = [*find_mtp_tensors(folder, target.quantization)] if with_weights else ["mtp."]
    if not names or any(name.startswith("mtp.layers.1.") for name in names):
        raise ValueError(f"method='mtp': {folder}: must have a head of one layer (mtp.layers.0)")


def find_mtp_tensors(folder: Path, quantization: Any) -> dict[str, Path]:
    """Return a dict that maps the name of each tensor of the MTP head to the tensor's file.

    `quantization` is the checkpoint's QuantConfig or None.
    """
    files = find_tensors(folder, FLOAT_DTYPES + (quantization.dtypes if quantization else ()))
    unused = quantization.unused_tensors if quantization else ()
    return {name: file for name, file in files.items() if name.startswith("mtp.") and not name.endswith(unused)}


def read_mtp_tensors(folder: Path, quantization: Any) -> dict[str, torch.Tensor]:
    """Return the MTP head's tensors, on the CPU, with the names that `models/shared/head_models.py` uses.

    Weights are dequantized to float32, which takes little memory, because the head is a single layer.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, file in find_mtp_tensors(folder, quantization).items():
        with open_safetensors(file) as opened:
            tensors[quantization.own_name(name) if quantization else name] = opened.get_tensor(name)
    if quantization:
        packed = [name for name, x in tensors.items() if not x.is_floating_point()]
        if quantization.bits == 4 and packed:
            raise ValueError(f"{folder}: {packed[0]}: MTP heads in 4 bits are not supported")
        for name in [name for name, x in tensors.items() if x.dtype == quantization.dtype]:
            tensors[name] = _dequantized(name, tensors, quantization, folder)
    return {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}


def _dequantized(name: str, tensors: dict[str, torch.Tensor], quantization: Any, folder: Path) -> torch.Tensor:
    """Return the weight `name`, multiplied by its scales. Remove the scales from `tensors`."""
    module, values = name.removesuffix(".weight"), tensors[name]
    scheme = quantization.scheme_of(module)
    scales = tensors.pop(f"{module}.{scheme.scale_name}", None) if scheme else None
    needed = scheme.scales_shape(tuple(values.shape)) if scheme else tuple(values.shape)
    if scales is None or scales.numel() != prod(needed):
        raise ValueError(f"{folder}: {name}: has no scales of shape {list(needed)}")
    return scheme.dequantize(values, scales.reshape(needed))

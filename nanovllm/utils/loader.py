"""Loads a model's tokenizer and weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.moe.expert_weights import load_alternating, split_experts
from nanovllm.utils.checks import read_json
from nanovllm.utils.construction import get_construction
from nanovllm.utils.download import broken_file
from nanovllm.utils.dummy_weights import load_dummy
from nanovllm.utils.merged_tensors import WHOLE, load_whole
from nanovllm.utils.nested_names import text_name
from nanovllm.utils.progress import with_bar
from nanovllm.utils.refusals import bad_tensors, other_tensors
from nanovllm.utils.sharded_checkpoint import find_in_files

JSON_FILES = ("tokenizer", "tokenizer_config", "vocab", "added_tokens", "special_tokens_map", "config")
# for these families, AutoTokenizer, whose import takes up to two seconds more, would choose the class on the right
NAMED_FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next")
NAMED_TOKENIZERS = {"Qwen2Tokenizer": "Qwen2TokenizerFast", "PreTrainedTokenizerFast": "PreTrainedTokenizerFast"}
HEAD = "lm_head.weight"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
QUANTIZED_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}
BAR_DELAY = 1  # seconds until the progress bar is shown


def load_tokenizer(folder: str):
    """Load the tokenizer in `folder`, as AutoTokenizer does. Errors are ValueErrors that name a file or the folder."""
    # read here because transformers' errors do not name the broken file
    contents = {name: read_json(file) for name in JSON_FILES if (file := Path(folder, f"{name}.json")).exists()}
    import transformers  # only here, because importing it takes seconds

    config, name = contents.get("tokenizer_config", {}), "AutoTokenizer"
    if contents.get("config", {}).get("model_type") in NAMED_FAMILIES:
        name = NAMED_TOKENIZERS.get(config.get("tokenizer_class"), name)
    try:
        if transformers.__version__.startswith("4."):
            from nanovllm.utils.transformers_4 import load_with_version_4

            return load_with_version_4(name, folder, config)
        return getattr(transformers, name).from_pretrained(folder)
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"{folder}: can't load the tokenizer ({type(error).__name__}: {error})") from error


# -- weights -----------------------------------------------------------------------------------------------------------


def parameter(
    shape: tuple[int, ...], weight_loader: Callable, dtype: torch.dtype | None = None, is_linear: bool = False
) -> nn.Parameter:
    """Make a parameter. Its `weight_loader(parameter, loaded_weight, *shard_id)` returns the part that it has filled.

    The default dtype is that of the model under construction. In a quantized model, parameters with `is_linear` get no
    memory, because a weight format will replace them.
    """
    construction = get_construction()
    dtype = dtype or construction.dtype
    device = "meta" if is_linear and construction.is_quantized else None
    empty = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    empty.weight_loader = weight_loader
    return empty


def default_weight_loader(param: torch.Tensor, loaded_weight) -> torch.Tensor:
    """Copy a whole weight from the checkpoint."""
    return Shard(tuple(param.shape)).copy(param, loaded_weight)


def check_shape(weight, shape: tuple[int, ...]):
    """Return `weight`, a tensor or a safetensors slice, or call `weight`. Raises ValueError for another shape."""
    weight = weight(shape) if callable(weight) else weight
    stored_shape = tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape())
    if stored_shape != tuple(shape):
        raise ValueError(f"the checkpoint has shape {list(stored_shape)}, the model needs {list(shape)}")
    return weight


class Shard(NamedTuple):
    """Locates a rank's part of a weight, in the checkpoint and in the rank's parameter."""

    shape: tuple[int, ...]  # of the checkpoint weight
    rows: slice = slice(None)  # of the checkpoint weight
    columns: slice = slice(None)
    first_row: int = 0  # in the rank's parameter

    @property
    def parts(self) -> list["Shard"]:
        """This Shard alone, as a list. (A `RowRanges` has several Shards.)"""
        return [self]

    def copy(self, target: torch.Tensor, weight) -> torch.Tensor:
        """Copy this part of a weight or bias to `target`, and return the part of `target` that was filled.

        If `weight` is a safetensors slice, only this part is read.
        """
        weight = check_shape(weight, self.shape[: target.dim()])
        weight = weight[self.rows, self.columns] if target.dim() == 2 else weight[self.rows]
        if weight.dtype != target.dtype and (weight.element_size() == 1 or not weight.is_floating_point()):
            raise ValueError(
                f"the checkpoint has dtype {str(weight.dtype)[6:]}, the model needs {str(target.dtype)[6:]}"
            )
        return target.narrow(0, self.first_row, len(weight)).copy_(weight)


@torch.no_grad()
def load_model(
    model: nn.Module, folder: Path, device: torch.device, load_format: str = "auto", show_progress: bool = False
) -> None:
    """Fill `model` from the safetensors files in `folder`. If `load_format` is "dummy", use random numbers instead.

    Raises ValueError or FileNotFoundError. The error names the tensor or file that is missing, unexpected, stored twice
    or broken, or the tensor whose shape or dtype is wrong, or whose values are NaN or infinite.
    """
    if model.config.quantization:
        model.config.quantization.prepare(model, device)
    if load_format == "dummy":
        load_dummy(model, weight_loaders(model))
        return
    tensors = find_model_tensors(model, folder)
    loaders = weight_loaders(model)
    if model.config.moe:
        split_experts(loaders, model, tensors)
    if model.config.quantization:
        model.config.quantization.adapt(loaders, tensors)
    if tensors.keys() != loaders.keys():
        raise other_tensors(folder, tensors.keys(), loaders.keys())
    bounds = {}  # the least and greatest element of each tensor
    in_order = sorted({tensor.file for tensor in tensors.values()})
    if show_progress and len(in_order) > 1:
        in_order = with_bar(in_order, desc="Loading weights", unit=" files", delay=BAR_DELAY, leave=False)
    for file in in_order:
        with open_safetensors(file, device) as content:
            for name, stored in tensors.items():
                if stored.file != file:
                    continue
                load, shard_id = loaders[name]
                try:
                    filled = load(content.get_slice(stored.name), *shard_id)
                except ValueError as error:
                    raise ValueError(f"{folder}: {name}: {error}") from error
                if filled is not None:
                    bounds[name] = torch.stack(filled.aminmax())  # NaN if any element is NaN
    are_finite = torch.stack([*bounds.values()]).isfinite().all(1).tolist()  # the only wait for the device
    if broken := sorted(name for name, is_finite in zip(bounds, are_finite) if not is_finite):
        raise bad_tensors(folder, broken, f"are NaN or infinite in {bounds[broken[0]].dtype}")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    file: Path
    name: str  # in the file


def find_model_tensors(model: nn.Module, folder: Path) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors that `model` reads, by their names in `model`.

    A head that config.json ties to the embedding, but that differs from it, becomes a separate weight.
    """
    quantization = model.config.quantization
    files = find_tensors(folder, FLOAT_DTYPES + (quantization.dtypes if quantization else ()))

    def own_name(name: str) -> str:
        if "embed_tokens.weight" in files:  # a base model, which was saved without its head
            name = f"model.{name}"
        elif getattr(model, "may_be_nested", False):
            name = text_name(name)
        return quantization.own_name(name) if quantization else name

    tensors = {own_name(name): StoredTensor(file, name) for name, file in files.items()}
    if model.config.tie_word_embeddings and HEAD in tensors:
        from nanovllm.utils.tied_head import untie_other_head

        untie_other_head(model, tensors)
    return {name: tensor for name, tensor in tensors.items() if not is_unused(model, name)}


def is_unused(model: nn.Module, name: str) -> bool:
    tied = (HEAD,) if model.config.tie_word_embeddings else ()  # the embedding is the head
    scales = model.config.quantization.unused_tensors if model.config.quantization else ()
    # old checkpoints of Llama store the frequencies of the rotary embedding, which config.json defines
    prefixes = getattr(model, "unused_prefixes", ())
    return name.endswith((".rotary_emb.inv_freq", *tied, *scales)) or name.startswith(prefixes)


def find_tensors(folder: Path, dtypes: tuple[str, ...] = FLOAT_DTYPES) -> dict[str, Path]:
    """Return the file of every checkpoint tensor in `folder`. Raises ValueError for a dtype that is not in `dtypes`.

    As in transformers, only `model.safetensors` is read if it exists.
    """
    if (single := folder / "model.safetensors").is_file():
        tensors = {name: (single, dtype) for name, dtype in stored_dtypes(single).items()}
    else:
        tensors = find_in_files(folder, stored_dtypes)
    for name, (file, dtype) in tensors.items():
        if dtype not in dtypes:
            raise ValueError(f"{file}: {name} has dtype {dtype}: must be one of {', '.join(dtypes)}")
    return {name: file for name, (file, _) in tensors.items()}


def stored_dtypes(file: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a file, as safetensors names it."""
    with open_safetensors(file) as tensors:
        return {name: tensors.get_slice(name).get_dtype() for name in [*tensors.keys()]}


def open_safetensors(file: Path, device: torch.device | str = "cpu"):
    """Open a file. Raises a ValueError that names the file if it can't be read."""
    try:
        return safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        raise broken_file(file, f"is not a complete safetensors file ({error})") from error


def weight_loaders(model: nn.Module) -> dict[str, tuple[Callable, list[Any]]]:
    """Return (loader, shard id) by checkpoint name. For a whole parameter, the shard id is empty."""
    loaders = {}
    for name, parameter in model.named_parameters():
        load = partial(getattr(parameter, "weight_loader", default_weight_loader), parameter)
        path, _, kind = name.rpartition(".")  # kind: weight or bias
        module = model.get_submodule(path)
        if getattr(module, "alternates", False):
            load = partial(load_alternating, load, kind)
        for stored, shard_id in stored_modules(path, module, model.packed_modules_mapping).items():
            if shard_id == [WHOLE]:
                load, shard_id = partial(load_whole, load, module), []
            loaders[".".join(filter(None, (stored, kind)))] = load, shard_id
    return loaders


def stored_modules(path: str, module: Any, packed_modules_mapping: dict) -> dict[str, list]:
    """Return the shard ids, as lists, of the checkpoint modules that make up the module at `path`, by name.

    A list is empty if the module merges nothing. Shards that the module lacks, as some attention layers lack values,
    are left out.
    """
    parent, _, own = path.rpartition(".")
    known = (*module.shard_ids(), (WHOLE,)) if hasattr(module, "shard_ids") else None
    merged = {name: [shard_id] for name, (layer, shard_id) in packed_modules_mapping.items() if layer == own}
    return {
        ".".join(filter(None, (parent, name))): shard_id
        for name, shard_id in (merged or {own: []}).items()
        if not shard_id or known is None or tuple(shard_id) in known
    }

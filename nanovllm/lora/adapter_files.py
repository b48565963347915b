"""Reads adapters from PEFT folders into host memory, and checks them completely before anything is changed."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from nanovllm.lora.adapter_config import CONFIG_FILE, AdapterConfig
from nanovllm.lora.adapter_tensors import MATRICES, PREFIX, AdapterTensors
from nanovllm.lora.expert_files import WRAPPED, ExpertReader, ExpertsShape
from nanovllm.lora.lora_request import Adapter, LoRARequest
from nanovllm.utils.loader import open_safetensors
from nanovllm.utils.model_files import BUNDLED
from nanovllm.utils.nested_names import nested_names, text_name

if TYPE_CHECKING:
    from nanovllm.config import Config

WEIGHTS_FILE = "adapter_model.safetensors"


def read_adapter(
    request: LoRARequest,
    config: "Config",
    shapes: Mapping[str, tuple[int, int]],
    experts: Mapping[str, ExpertsShape],
) -> Adapter:
    """Read the adapter of a request.

    Raises FileNotFoundError if a file is missing. Raises ValueError or TypeError if a file is broken, an entry is not
    supported, or a tensor is missing, unexpected or invalid. Tensors are invalid if their shape or dtype is wrong, or
    if they contain NaN or infinity. Error messages name the file, and the entry or tensor.
    """
    try:
        folder = BUNDLED / request.lora_path
        if not (folder / CONFIG_FILE).is_file():
            folder = Path(request.lora_path).expanduser()
    except (OSError, RuntimeError) as error:  # the path is too long, or begins with "~" and an unknown user
        raise ValueError(f"lora_path={request.lora_path!r:.80}: can't be used ({error!s:.80})") from error
    adapter_config = AdapterConfig.read(folder)
    if not (file := folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder}: the folder holds no {WEIGHTS_FILE}; other formats are not supported")
    stacks = {path + suffix for path in experts for suffix in ("", WRAPPED)}
    single = [name for path, shape in experts.items() for name in shape.single_names(path)]
    parts: list[torch.Tensor] = []
    ranks = []
    with open_safetensors(file) as opened:
        tensors = AdapterTensors(file, opened, config.model_config.dtype)
        modules = _modules(tensors, {*shapes, *stacks, *single})
        linear = {name: stored for name, stored in modules.items() if name not in stacks}
        _check_targets(file, adapter_config, linear, [*shapes, *(single if linear.keys() & single else ())])
        for name, (inputs, outputs) in shapes.items():
            if (stored := modules.get(name)) is None:
                ranks.append(0)
                continue
            ranks.append(rank := adapter_config.rank_within(stored, "max_lora_rank", config.max_lora_rank))
            parts += tensors.pair(stored, (rank, inputs), (outputs, rank), adapter_config.scale_of(stored))
        reader = ExpertReader(tensors, adapter_config, experts, modules, config.max_expert_lora_rank)
        for matrices in (matrices for path in experts for matrices in reader.read(path)):
            ranks.append(0 if matrices is None else matrices[0].shape[1])
            parts += matrices or ()
    weights = torch.cat([part.flatten() for part in parts])
    salt = xxhash.xxh3_64_intdigest(weights.view(torch.uint8).numpy(), seed=hash(tuple(ranks)) % 2**64)
    if config.device != "cpu":
        with torch.cuda.device(config.device_of(0)):
            weights = weights.pin_memory()  # so that the host does not wait for copies to the device
    return Adapter(request, ranks, weights, salt)


def _modules(tensors: AdapterTensors, known: Collection[str]) -> dict[str, str]:
    """Map the name of each adapted module in the model to the module's name in the file.

    `known` contains the names in the model.
    """
    modules: dict[str, str] = {}
    for name in tensors.names:
        path, kind = next(((name[: -len(kind)], kind) for kind in MATRICES if name.endswith(kind)), (name, ""))
        if not kind or not path.startswith(PREFIX):
            raise ValueError(
                f"{tensors.file}: {name}: is not supported; a tensor must be a matrix lora_A or lora_B of a module"
            )
        stored = path.removeprefix(PREFIX)
        own = next((own for own in (stored, text_name(stored), *nested_names(stored)) if own in known), None)
        if own is None:
            raise ValueError(
                f"{tensors.file}: {name}: this engine has no adapters for {stored!r:.200}; only linear layers of "
                "attention and of feed-forward layers, and experts, can have one, not embeddings, the output head or "
                "routers"
            )
        if modules.setdefault(own, stored) != stored:
            raise ValueError(f"{tensors.file}: {name}: {modules[own]!r:.200} is the same module")
    if not modules:
        raise ValueError(f"{tensors.file}: has no tensors")
    return modules


def _check_targets(file: Path, config: AdapterConfig, modules: dict[str, str], names: list[str]) -> None:
    """Check that the config names all of `modules`.

    Also check that `modules` contains every module in `names` that the config requires.
    """
    for stored in modules.values():
        if not config.includes(stored):
            entries = "target_modules" if config.layers is None else "target_modules and layers_to_transform"
            raise ValueError(f"{file}: {PREFIX}{stored}: does not match {entries} in {config.file}")
    # an expression might match names that the model has in transformers, but not this engine's names
    has_same_names = all(name == stored for name, stored in modules.items())
    is_sure = isinstance(config.target_modules, tuple) or config.target_modules == "all-linear" or has_same_names
    for name in names:
        if is_sure and name not in modules and config.includes(name):
            raise ValueError(f"{file}: {PREFIX}{name}{MATRICES[0]} is missing, but matches target_modules")

"""Reads adapters from PEFT folders into host memory, and checks them completely before anything is changed."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import xxhash

from nanovllm.lora.adapter_config import CONFIG_FILE, AdapterConfig
from nanovllm.lora.lora_request import Adapter, LoRARequest
from nanovllm.utils.loader import open_safetensors
from nanovllm.utils.model_files import BUNDLED
from nanovllm.utils.nested_names import nested_names, text_name

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.lora.adapter_queue import AdapterSlots

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's name of the base model
MATRICES = ".lora_A.weight", ".lora_B.weight"
FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16


class AdapterRegistry:
    """The adapters in host memory. Any thread may call the methods.

    An adapter stays in memory while a request uses it, while it has a slot on the devices, and from `add` until
    `remove`.
    """

    def __init__(self, config: "Config", shapes: Mapping[str, tuple[int, int]], slots: "AdapterSlots"):
        """shapes: (inputs, outputs) of each module that can have an adapter, by its name in checkpoints.

        slots: the adapters on the devices.
        """
        self._config, self.shapes, self.slots = config, shapes, slots
        self._loaded: WeakValueDictionary[LoRARequest, Adapter] = WeakValueDictionary()
        self._added: dict[int, Adapter] = {}  # by `lora_int_id`
        self._lock = threading.Lock()  # so that two threads do not read the same adapter

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter, reading it if necessary. Raises the errors of `read_adapter`."""
        if (adapter := self._loaded.get(request)) is not None:  # without waiting for other reads
            return adapter
        with self._lock:
            if (adapter := self._loaded.get(request)) is None:
                adapter = self._loaded[request] = read_adapter(request, self._config, self.shapes)
            return adapter

    def add(self, request: LoRARequest) -> None:
        """Read an adapter, and keep it in memory until it is removed. Raises the errors of `read_adapter`."""
        self._added[request.lora_int_id] = self.get(request)

    def remove(self, lora_int_id: int) -> bool:
        """Undo `add`. Running requests keep the adapter until they end. Return whether the adapter had been added."""
        return self._added.pop(lora_int_id, None) is not None


def read_adapter(request: LoRARequest, config: "Config", shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read the adapter of a request.

    Raises FileNotFoundError if a file is missing. Raises ValueError or TypeError if a file is broken, if an entry is
    not supported, or if a tensor is missing, is unexpected, has a wrong shape or dtype, or contains NaN or infinity.
    The message names the file, and the entry or tensor.
    """
    folder = BUNDLED / request.lora_path
    if not (folder / CONFIG_FILE).is_file():
        folder = Path(request.lora_path).expanduser()
    adapter_config = AdapterConfig.read(folder)
    if not (file := folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder}: the folder holds no {WEIGHTS_FILE}; other formats are not supported")
    dtype, ranks, parts = config.model_config.dtype, [], []
    with open_safetensors(file) as tensors:
        modules = _modules(file, [*tensors.keys()], shapes)
        _check_targets(file, adapter_config, modules, shapes)
        for name, shape in shapes.items():
            stored = modules.get(name)
            ranks.append(0 if stored is None else adapter_config.rank_of(stored))
            if stored is None:
                continue
            if (rank := ranks[-1]) > config.max_lora_rank:
                problem = (
                    f"the adapter of {stored} has rank {rank}: must be at most max_lora_rank={config.max_lora_rank}"
                )
                raise ValueError(f"{adapter_config.file}: {problem}")
            inputs, outputs = shape
            a = _matrix(file, tensors, PREFIX + stored + MATRICES[0], (rank, inputs), dtype, 1.0)
            scale = adapter_config.scale_of(stored)
            parts += [a, _matrix(file, tensors, PREFIX + stored + MATRICES[1], (outputs, rank), dtype, scale)]
    weights = torch.cat(parts)
    salt = xxhash.xxh3_64_intdigest(weights.view(torch.uint8).numpy(), seed=hash(tuple(ranks)) % 2**64)
    if config.device != "cpu":
        with torch.cuda.device(config.device_of(0)):
            weights = weights.pin_memory()  # so that the host does not wait for copies to the device
    return Adapter(request, ranks, weights, salt)


def _modules(file: Path, names: list[str], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules that have an adapter in `file`, as a dict from this model's names to the file's names."""
    modules: dict[str, str] = {}
    for name in names:
        path, kind = next(((name[: -len(kind)], kind) for kind in MATRICES if name.endswith(kind)), (name, ""))
        if not kind or not path.startswith(PREFIX):
            raise ValueError(
                f"{file}: {name}: is not supported; a tensor must be a matrix lora_A or lora_B of a module"
            )
        stored = path.removeprefix(PREFIX)
        own = next((own for own in (stored, text_name(stored), *nested_names(stored)) if own in shapes), None)
        if own is None:
            raise ValueError(
                f"{file}: {name}: this engine has no adapters for {stored!r:.200}; only linear layers of attention and "
                "of dense feed-forward layers can have one, not embeddings, the output head, experts or routers"
            )
        modules[own] = stored
    if not modules:
        raise ValueError(f"{file}: has no tensors")
    return modules


def _check_targets(file: Path, config: AdapterConfig, modules: dict[str, str], shapes: Mapping[str, Any]) -> None:
    """Check that the file contains the modules that the config names."""
    for stored in modules.values():
        if not config.includes(stored):
            raise ValueError(f"{file}: {PREFIX}{stored}: does not match target_modules in {config.file}")
    for name in shapes:
        is_sure = isinstance(config.target_modules, tuple) and config.has_all_layers
        if is_sure and name not in modules and config.includes(name):
            raise ValueError(f"{file}: {PREFIX}{name}{MATRICES[0]} is missing, but matches target_modules")


def _matrix(
    file: Path, tensors: Any, name: str, shape: tuple[int, int], dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Return the matrix `name` times `scale`, in `dtype` and flattened."""
    if name not in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
        raise ValueError(f"{file}: {name} is missing")
    matrix = tensors.get_tensor(name)
    if tuple(matrix.shape) != shape:
        raise ValueError(f"{file}: {name}: has shape {list(matrix.shape)}: must be {list(shape)}")
    if matrix.dtype not in FLOATS:
        known = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
        raise ValueError(
            f"{file}: {name}: has dtype {str(matrix.dtype).removeprefix('torch.')}: must be one of {known}"
        )
    matrix = (matrix.float() * scale).to(dtype).flatten()
    if not matrix.isfinite().all():
        raise ValueError(f"{file}: {name}: is NaN or infinite in {str(dtype).removeprefix('torch.')}")
    return matrix

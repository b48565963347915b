"""Replaces the weights of a running engine. The weights' addresses do not change, so CUDA graphs stay valid."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.engine.engine import UnavailableError
from nanovllm.moe.expert_weights import split_experts
from nanovllm.rollout.changes import LOADING, Dropped, in_engine, refusing_requests
from nanovllm.rollout.sleep import sleepers_of
from nanovllm.utils.loader import (
    FLOAT_DTYPES,
    HEAD,
    QUANTIZED_DTYPES,
    check_shape,
    find_tensors,
    is_unused,
    open_safetensors,
    weight_loaders,
)
from nanovllm.utils.nested_names import text_name
from nanovllm.utils.tensor_parts import TensorPart
from nanovllm.utils.tied_head import head_name

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.model_runner import ModelRunner

INCOMPLETE = "load_weights() has failed in the middle: load all weights, in one call, before the engine can generate"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_weights(llm: "LLMEngine", weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace some or all weights of a running engine, and empty the prefix cache. Tensors may be on any device.

    `weights` yields (name, tensor) pairs, with names as in a checkpoint or in the transformers model's state dict.
    Tensors must not be merged or split over ranks. An engine with 8-bit weights accepts unquantized tensors, which it
    quantizes, and 8-bit values with scales in the format of its checkpoint. An engine with `quantization="int4"`
    accepts unquantized tensors. An engine with a 4-bit checkpoint accepts no weights. The caller's thread iterates over
    `weights`, so a generator can create one tensor at a time.

    Raises UnavailableError if there are requests and the engine is not paused, or if `sleep` has freed the weights. New
    requests raise UnavailableError until this function returns.

    Each tensor is checked before it is written. Raises TypeError if a value is not a tensor. Raises a ValueError that
    names the tensor if the model has no such tensor, if the shape or dtype is wrong, or if a value is NaN or infinite.
    If an error occurs after a tensor was written, the engine refuses requests until a single call of `load_weights` has
    loaded all weights.
    """
    update = WeightUpdate(llm)
    in_engine(llm.engine_thread, update.begin)
    try:
        for name, tensor in weights:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()  # the engine uses another stream
            in_engine(llm.engine_thread, partial(update.load, name, tensor))
    except BaseException as error:
        update.end(is_broken=update.has_written or not isinstance(error, Exception))  # Ctrl-C does not end `load`
        raise
    update.end(is_broken=False)


def weights_of(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of the checkpoint in `folder`. A tensor is read only when it is needed.

    If a file is missing or broken, raises a FileNotFoundError or ValueError that names the file.
    """
    files = find_tensors(Path(folder), (*FLOAT_DTYPES, *QUANTIZED_DTYPES.values()))
    for file in sorted(set(files.values())):
        with open_safetensors(file) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                yield name, tensors.get_tensor(name)


class WeightUpdate:
    """One call of `load_weights`. The engine's thread calls `begin` and `load`, and the caller's thread calls `end`."""

    def __init__(self, llm: "LLMEngine"):
        self.llm, self.core = llm, llm.core
        self.has_written = self.is_over = False

    def begin(self) -> None:
        runner, unavailable = self.core.model_runner, self.core.unavailable
        assert runner is not None, "the engine is open"
        if (formats := runner.model.config.quantization) and not formats.quantizes:
            raise ValueError(
                f"load_weights: the weights of a checkpoint in the format {formats.name!r} can't be replaced; "
                "with a 16-bit checkpoint and quantization='int4', they can"
            )
        self.reason_before = reason = unavailable.get("weights")
        with refusing_requests(self.llm, "weights", LOADING):
            if self.llm.config.enable_sleep_mode and not sleepers_of(runner)["weights"].is_mapped:
                raise UnavailableError("the weights sleep: call wake_up(tags=['weights']) before load_weights()")
            self.weights = ModelWeights(runner.model)
        if isinstance(reason, Dropped):
            self.weights = reason.weights = reason.weights or self.weights
        self.core.scheduler.block_manager.clear_prefix_cache()  # no sequence holds blocks

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Check and load a tensor on rank 0, and then load it on the other ranks."""
        if self.is_over:
            return
        if self.weights.is_unused(name):
            self.weights.check_tied_head(name, tensor)
            return
        name = self.weights.own_name(name)
        self.weights.check(name, tensor)
        had_written, self.has_written = self.has_written, True
        try:
            self.weights.load(name, tensor)
        except ValueError:
            self.has_written = had_written  # a loader checks before it writes
            raise
        if self.core.workers.processes:
            self.core.workers.send_tensor(WeightPart._make, name, tensor)

    def end(self, is_broken: bool) -> None:
        self.is_over = True
        if is_broken:
            self.core.unavailable["weights"] = INCOMPLETE
        elif self.reason_before is None or self.weights.has_all():
            self.core.unavailable.pop("weights")
        else:
            self.core.unavailable["weights"] = self.reason_before


class ModelWeights:
    """Loads tensors with checkpoint names into the model of one rank."""

    def __init__(self, model: Any):
        self.model, self.loaders = model, weight_loaders(model)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of expert weights; this rank may have no part of them
        self._loaded: set[str] = set()
        self._quantized: set[str] = set()  # loaded weights whose scales were computed here
        for path, experts in model.named_modules():
            for name, (parameter, ids) in getattr(experts, "tensors_of_experts", dict)().items():
                self.loaders[f"{path}.{name}"] = partial(parameter.weight_loader, parameter), [*ids]
                if name.endswith(".weight"):
                    self._shapes[f"{path}.{name}"] = experts.shard(ids[1]).shape
        formats = model.config.quantization.dtypes if model.config.quantization else ()
        self._dtypes = (*FLOATS, *(dtype for dtype, name in QUANTIZED_DTYPES.items() if name in formats))

    def is_unused(self, name: str) -> bool:
        return isinstance(name, str) and is_unused(self.model, name)

    def check_tied_head(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if `tensor` is the output head of a model with tied weights, but differs from the embedding.

        A head that arrives before the embedding is not compared, because storing the head would cost memory.
        """
        is_tied = self.model.config.tie_word_embeddings  # otherwise, an engine that pools ignores the head
        if name != HEAD or not is_tied or head_name(self.model) not in self._loaded:
            return
        head = self.model.lm_head
        head_rows = tensor[head.first_id : head.first_id + len(head.weight)].to(head.weight)
        if not torch.equal(head_rows, head.weight):
            problem = "differs from the embedding, which this engine uses as its output head too (tie_word_embeddings)"
            raise ValueError(f"{name}: {problem}")

    def own_name(self, name: str) -> str:
        """Return the model's name for a tensor, with `language_model.` added or removed where necessary.

        The names in the trainer and in the engine differ if either of them has loaded only the language part of a
        multimodal checkpoint. The names also differ if the trainer's model has no output head.
        """
        parts = str(name).split(".language_model.", 1)
        other_name = ".".join(parts) if len(parts) > 1 else str(name).replace("model.", "model.language_model.", 1)
        own_names = other_name, text_name(str(name)), f"model.{name}"  # the last one is for a name from a base model
        return next((own for own in own_names if own in self.loaders), name)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise the errors that `load_weights` documents. A loader may detect a wrong shape later, but always before it
        writes.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"weights: {name!r:.80} has a {type(tensor).__name__}: must be a torch.Tensor")
        if name not in self.loaders:
            raise ValueError(f"weights: {name!r:.200}: the model has no such tensor")
        if tensor.dtype not in self._dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise ValueError(f"{name}: its dtype is {str(tensor.dtype).removeprefix('torch.')}: must be one of {known}")
        if name in self._shapes:
            _named(name, check_shape, tensor, self._shapes[name])
        values = tensor.float() if tensor.dtype in QUANTIZED_DTYPES else tensor.to(self.model.config.dtype)
        if not values.isfinite().all():
            raise ValueError(f"{name}: is NaN or infinite in {values.dtype}")

    def load(self, name: str, tensor: torch.Tensor) -> None:
        load, ids = self.loaders[name]
        is_quantized = tensor.dtype in QUANTIZED_DTYPES
        with torch.no_grad():
            _named(name, load, TensorSlice(tensor) if is_quantized else tensor.detach(), *ids)
        self._loaded.add(name)
        if not is_quantized:
            self._quantized.add(name)

    def has_all(self) -> bool:
        loaders = weight_loaders(self.model)
        split_experts(loaders, self.model, self._loaded)
        missing = loaders.keys() - self._loaded
        return all(name.rpartition("_scale")[0] in self._quantized for name in missing)


def _named(name: str, work: Callable, *arguments: Any) -> None:
    try:
        work(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class TensorSlice:
    """Wraps a tensor of 8-bit values. The object has the methods of a safetensors slice, which the loaders need."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        return QUANTIZED_DTYPES[self._tensor.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


# -- several ranks -----------------------------------------------------------------------------------------------------


class WeightPart(TensorPart):
    """A message with a part of a weight. The receiving rank loads the weight when all parts have arrived."""

    def receive(self, words: np.ndarray, runner: "ModelRunner", incoming: dict[Any, Any]) -> None:
        if (tensor := self.join(words, incoming)) is not None:
            if ModelWeights not in incoming:
                incoming[ModelWeights] = ModelWeights(runner.model)
            incoming[ModelWeights].load(self.name, tensor)

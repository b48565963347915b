"""Prepares an engine for adapters. Stores adapters on the devices of all ranks, between two steps."""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.engine import Engine
from nanovllm.lora.adapter_queue import AdapterQueue, AdapterSlots
from nanovllm.lora.adapter_registry import AdapterRegistry
from nanovllm.lora.lora_request import Adapter
from nanovllm.utils.tensor_parts import TensorPart

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

LORA_RANKS, LORA_WEIGHTS = "ranks of an adapter", "weights of an adapter"


class AdapterPart(NamedTuple):
    """A message with a part of an adapter. The receiver stores the adapter when all parts have arrived.

    The first parts contain the ranks of the matrices, and the remaining parts contain the weights.
    """

    slot: int
    part: TensorPart

    def receive(self, words: np.ndarray, runner: "ModelRunner", incoming: dict[Any, Any]) -> None:
        if (tensor := self.part.join(words, incoming)) is None:
            return
        if self.part.name == LORA_RANKS:
            incoming[AdapterPart] = tensor.tolist()
        else:
            with runner.on_device():
                runner.model.adapters.write(self.slot, incoming.pop(AdapterPart), tensor)


def use_adapters(engine: Engine) -> None:
    """Set `engine.adapters`, and make sequences wait until their adapter has a slot. The model must be loaded."""
    assert engine.model_runner is not None
    scheduler, slots = engine.scheduler, AdapterSlots(engine.config.max_loras, partial(_write, engine))
    stacks = engine.model_runner.model.adapters
    engine.adapters = AdapterRegistry(engine.config, stacks.shapes, stacks.experts, slots)
    scheduler.make_queue = partial(AdapterQueue, scheduler, slots)  # type: ignore[method-assign]
    scheduler.reset()


def _write(engine: Engine, slot: int, adapter: Adapter) -> None:
    """Store an adapter on all ranks."""
    runner = engine.model_runner
    assert runner is not None, "the engine is open"
    if engine.workers.processes:
        for name, tensor in ((LORA_RANKS, torch.tensor(adapter.ranks)), (LORA_WEIGHTS, adapter.weights)):
            engine.workers.send_tensor(partial(AdapterPart, slot), name, tensor)
    with runner.on_device():
        runner.model.adapters.write(slot, adapter.ranks, adapter.weights)

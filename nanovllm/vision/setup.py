"""Prepares an engine's scheduler and prefix cache for images. Sends images to the other ranks."""

import pickle
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.engine.engine import Engine
from nanovllm.utils.replace import replace_methods
from nanovllm.utils.tensor_parts import TensorPart
from nanovllm.vision.image_blocks import ImageBlocks
from nanovllm.vision.image_budget import ImageScheduler, cost_of_image


class ImagePart(TensorPart):
    """A part of a message to another rank. When all parts have arrived, the rank calls a method of its ImageStore.

    Together, the parts contain the pickled arguments of `ImageStore.tell_ranks`. They are not fields of this class,
    because the class is pickled into a message's header, which has a constant size.
    """

    def receive(self, words: np.ndarray, runner: Any, incoming: dict[Any, Any]) -> None:
        if (tensor := self.join(words, incoming)) is not None:
            leaving, method, *arguments = pickle.loads(tensor.numpy())
            with runner.on_device():
                runner.images.remove(leaving)
                getattr(runner.images, method)(*arguments)


def use_images(engine: Engine) -> None:
    """Prepare the ranks and the prefix cache of an engine for images. The engine's scheduler must already exist."""
    runner: Any = engine.model_runner
    blocks: Any = engine.scheduler.block_manager
    replace_methods(blocks, ImageBlocks, "Image")
    blocks.forget_images = runner.images.clear
    scheduler: Any = engine.scheduler
    replace_methods(scheduler, ImageScheduler, "Image")
    scheduler.images, scheduler.on_device = runner.images, runner.on_device
    scheduler.cost_of_image = lambda image: cost_of_image(image.num_tokens, engine.config.model_config)
    if engine.workers.processes:
        runner.images.tell_ranks = partial(_tell_ranks, engine)


def _tell_ranks(engine: Engine, *message: Any) -> None:
    data = bytearray(pickle.dumps(message))
    engine.workers.send_tensor(ImagePart._make, "images", torch.frombuffer(data, dtype=torch.uint8))

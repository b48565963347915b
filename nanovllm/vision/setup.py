"""Prepares an engine's scheduler and prefix cache for images. Sends images to the other ranks."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.engine import Engine
from nanovllm.utils.replace import replace_methods
from nanovllm.utils.tensor_parts import TensorPart
from nanovllm.vision.image_blocks import ImageBlocks
from nanovllm.vision.image_budget import ImageScheduler, cost_of_image
from nanovllm.vision.prompt_images import PromptImage


class ImagePart(NamedTuple):
    """A part of a message to another rank. The rank computes an image's embeddings when all parts have arrived.

    Together, the parts contain the image's pixels, and digests of images. The rank drops these images to free memory.
    `image` has no pixels.
    """

    image: PromptImage
    num_bytes: int  # of the pixels
    part: TensorPart

    def receive(self, words: np.ndarray, runner: Any, incoming: dict[Any, Any]) -> None:
        if (tensor := self.part.join(words, incoming)) is not None:
            data, size = tensor.numpy().tobytes(), len(self.image.digest)
            leaving = [data[begin : begin + size] for begin in range(self.num_bytes, len(data), size)]
            with runner.on_device():
                runner.images.add(self.image._replace(pixels=data[: self.num_bytes]), leaving)


def use_images(engine: Engine) -> None:
    """Prepare the ranks and the prefix cache of an engine for images. The engine's scheduler must already exist."""
    runner: Any = engine.model_runner
    blocks: Any = engine.scheduler.block_manager
    replace_methods(blocks, ImageBlocks, "Image")
    blocks.forget_images = runner.images.clear
    scheduler: Any = engine.scheduler
    replace_methods(scheduler, ImageScheduler, "Image")
    scheduler.cost_of_image = lambda image: (
        0 if image.digest in runner.images else cost_of_image(image.num_tokens, engine.config.model_config)
    )
    if engine.workers.processes:
        runner.images.tell_ranks = partial(_tell_ranks, engine)


def _tell_ranks(engine: Engine, image: PromptImage, leaving: list[bytes]) -> None:
    data = torch.frombuffer(bytearray(b"".join((image.pixels, *leaving))), dtype=torch.uint8)
    make_part = partial(ImagePart, image._replace(pixels=b""), len(image.pixels))
    engine.workers.send_tensor(make_part, "an image", data)

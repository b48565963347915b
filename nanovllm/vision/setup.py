"""Prepares an engine's scheduler and prefix cache for images. Sends images to the other ranks."""

from functools import partial
from itertools import accumulate
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
    """A part of a message to another rank. The rank computes embeddings of images when all parts have arrived.

    All parts together contain the pixels of `images`, and the digests of images that the rank drops to free memory. The
    objects in `images` contain no pixels.
    """

    images: list[PromptImage]
    num_bytes: list[int]  # of each image's pixels
    part: TensorPart

    def receive(self, words: np.ndarray, runner: Any, incoming: dict[Any, Any]) -> None:
        if (tensor := self.part.join(words, incoming)) is not None:
            data, size = tensor.numpy().tobytes(), len(self.images[0].digest)
            *begins, end = accumulate(self.num_bytes, initial=0)
            pixels = [data[begin : begin + n] for begin, n in zip(begins, self.num_bytes)]
            leaving = [data[i : i + size] for i in range(end, len(data), size)]
            with runner.on_device():
                runner.images.add([image._replace(pixels=x) for image, x in zip(self.images, pixels)], leaving)


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


def _tell_ranks(engine: Engine, images: list[PromptImage], leaving: list[bytes]) -> None:
    data = b"".join([*(image.pixels for image in images), *leaving])
    without_pixels = [image._replace(pixels=b"") for image in images]
    make_part = partial(ImagePart, without_pixels, [len(image.pixels) for image in images])
    engine.workers.send_tensor(make_part, "images", torch.frombuffer(bytearray(data), dtype=torch.uint8))
